"""The doctor at work in a run: facts that only the runtime can establish, probes, and `doctor.jsonl`.

After each step it adds to the step's metrics what the samples, the masks and the weights say (facts under `doctor/`,
which stay out of the logs), has `observe.doctor` examine them, and writes what that says. Every fact is a pass over
numbers that are there, and a hash over a fixed sample of each model's weights; models run again only in a probe, when
engine and trainer disagree and the doctor is about to say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from plait.errors import RunError
from plait.models.backbone_model import BackboneModel
from plait.models.language_model import LanguageModel
from plait.observe.doctor import Doctor, Finding
from plait.observe.doctor_reading import Diagnosis, Reading, Severity
from plait.observe.doctor_settings import DoctorSettings
from plait.observe.run_log import RunLog, cut_after
from plait.runtime.health.inspected_run import InspectedRun
from plait.runtime.health.probe import Suspects, diagnose
from plait.runtime.health.step_facts import StepFacts
from plait.runtime.health.weight_facts import WeightFacts
from plait.runtime.steps.roles import models_of
from plait.runtime.steps.step import StepState


class RunDoctor:
    """Open before the first step of a run or of its continuation: the weights are then those that the step begins with.

    Args:
        path: `doctor.jsonl`; cut back to `last_step` when a run is resumed, else begun anew.
        last_step: step after which the run goes on.
        tell: shows a line to the user (`Progress.message`).

    Raises:
        RunError: the file cannot be written.
        DataError: it is damaged.
    """

    def __init__(
        self,
        inspected: InspectedRun,
        settings: DoctorSettings,
        path: Path,
        *,
        resume: bool,
        last_step: int,
        tell: Callable[[str], None],
    ) -> None:
        self._inspected = inspected
        # Samples may be as old as the recipe lets them be.
        most = max(settings.max_version_lag, inspected.recipe.max_staleness)
        self._settings = settings = settings.model_copy(update={"max_version_lag": most})
        self._tell = tell
        self._doctor = Doctor(settings, inspected.recipe.dtype.value, inspected.recipe.sampling.temperature)
        if resume and path.exists():
            cut_after(path, last_step)
            self._doctor.read(path)
        self._log = RunLog(path, resume=resume)
        self._step_facts = StepFacts(inspected)
        self._weight_facts = WeightFacts(inspected, lambda: self._doctor.baseline)
        for name, value in self._weight_facts.first().items():
            self._doctor.remember(last_step, name, value)
        self._write()

    def after_step(self, state: StepState, metrics: Mapping[str, float]) -> list[Finding]:
        """Examine the step that has just ended, weights published: what is new to say is told, written and returned.

        Args:
            metrics: all of the step's, `training/policy_version` after it included.

        Raises:
            RunError: the file cannot be written.
        """
        step = state.step + 1
        facts = self._step_facts.of_step(state, metrics) | self._weight_facts.of_step(step)
        numbers = {**metrics, **{f"doctor/{name}": value for name, value in facts.items()}}
        findings = self._doctor.examine(step, numbers, lambda reading: self._probe(state, reading))
        for finding in findings:
            self._tell(str(finding))
        self._write()
        return findings

    def stop_if_asked(self, findings: Sequence[Finding]) -> None:
        """To be called when the step is written.

        Raises:
            RunError: `doctor.stop_on` says that these findings end the run.
        """
        if self._settings.stop_on == "never":
            return
        limit = Severity(self._settings.stop_on)
        grave = [finding for finding in findings if finding.severity.rank >= limit.rank]
        if grave:
            raise RunError(f"{grave[0]}; `doctor.stop_on` is `{self._settings.stop_on}`")

    def summary(self) -> str:
        """The table for the end of the run; empty if all was well."""
        return self._doctor.summary_text()

    def sync(self) -> None:
        """Force the file to disk. Raises OSError."""
        self._log.sync()

    def close(self) -> None:
        self._log.close()

    def __enter__(self) -> RunDoctor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self) -> None:
        for row in self._doctor.take_rows():
            self._log.append(row)

    def _probe(self, state: StepState, reading: Reading) -> Diagnosis | None:
        """Look for the cause of a mismatch on the samples of the step's first rollout."""
        for node, _ in self._inspected.rollouts(state):
            role = models_of(self._inspected.roles).get(str(node.role))
            if role is None or role.engine is None or not (_whole(role.model, role.engine.model)):
                continue
            others = {
                name: model
                for name, model in self._inspected.models.items()
                if name not in self._inspected.flow.trained_roles and isinstance(model, LanguageModel) and _whole(model)
            }
            inspected = self._inspected
            temperature, has_come_apart = inspected.recipe.sampling.temperature, reading.has_come_apart
            suspects = Suspects(role, temperature, inspected.between_steps, others, has_come_apart)
            with inspected.workers.leader_weights.holding() as are_here:
                return diagnose(suspects, state.tables[node.id]) if are_here else None
        return None


def _whole(*models: BackboneModel | None) -> bool:
    """Whether this process has all of each model, and can compute with it by itself."""
    return all(model is not None and model.part is None for model in models)
