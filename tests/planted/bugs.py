"""Bugs that RLHF systems have had, each one place in this one; sources in the names of the field."""

from __future__ import annotations

from tests.planted.switch import Bug

LOSSES = "plait.algorithms.losses"
ADVANTAGES = "plait.algorithms.advantages"
CRITIC = "plait.algorithms.critic"
OPTIMIZER = "plait.training.optimizer:MasterOptimizer"

SAMPLING = (
    Bug(
        "shifted log-probs",
        "plait.data.packed:PackedBatch.predict_on_host_R",
        "all_places = torch.cat(places) if places",
        "all_places = (torch.cat(places) + 1).clamp(max=self.num_tokens - 1) if places",
        ("data/test_packed.py::test_by_hand", "training/test_trainer.py::test_scoring_equals_the_eager_model"),
        doctor="mask_shift",
    ),
    Bug(
        "un-scaled temperature",
        "plait.models.language_model:LanguageModel.logprobs_of",
        "targets_R, temperature, chunk_rows",
        "targets_R, 1.0, chunk_rows",
        ("training/test_trainer.py::test_scoring_equals_the_eager_model",),
        doctor="temperature",
    ),
    Bug(
        "stale sampler weights",
        "plait.workers.instances:engine_of",
        "return Engine(model, settings, keep_memory",
        "from plait.models.backbone_model import copy_of\n        return Engine(copy_of(model), settings, keep_memory",
        ("runs/test_algorithms.py::test_two_arms[grpo]",),
        doctor="stale_sampler_weights",
    ),
    Bug(
        "stale reference",
        "plait.workers.loading:_Shelf._fresh",
        "return copy_of(self._language[role_model.name])",
        "return self._language[role_model.name]",
        ("runtime/health/test_doctor.py::test_a_reference_that_changes_later_is_named",),
        doctor="stale_reference",
    ),
    Bug(
        "missing EOS",
        "plait.generation.response:Response.sample",
        "(self.token_ids, self.replies),\n        logprobs=drawn_of(self.logprobs, self.replies),",
        "(self.token_ids[: len(self.token_ids) - (reason is FinishReason.STOP)], self.replies),\n"
        "        logprobs=drawn_of(self.logprobs[: len(self.logprobs) - (reason is FinishReason.STOP)], self.replies),",
        ("generation/test_engine.py::test_ends",),
        doctor="missing_eos",
    ),
    Bug(
        "every sample of a group drawn with the same noise",
        "plait.kernels.noise:NoiseKey.sample_key",
        "prompt_uid, index, self.attempt",
        "prompt_uid, 0, self.attempt",
        ("kernels/test_noise.py::test_uniform_over_each_part_of_the_key",),
        doctor="dead_groups",
    ),
    Bug(
        "wrong group key",
        "plait.data.rows:Rows.groups",
        "groups.setdefault(sample.prompt.uid, [])",
        "groups.setdefault(position, [])",
        ("data/test_rows.py::test_offsets_groups_and_order",),
        doctor="dead_groups",
    ),
    Bug(
        "pad as EOS in the loss mask",
        "plait.training.mini_batch:mask_of",
        "        return None\n    assert",
        "        return np.array([float(t != 2) for s in rows.samples for t in s.token_ids])\n    assert",
        ("planted/test_ends.py::test_the_end_token_is_learnt",),
    ),
    Bug(
        "mask of given completions one token short",
        "plait.data.example_encoder:ExampleEncoder._text",
        "(1.0,) * (len(whole) - cut)",
        "(1.0,) * (len(whole) - cut - 1) + (0.0,)",
        ("data/test_examples.py::test_a_completion_is_learnt_with_its_end_and_a_prompt_is_not",),
        doctor="mask_shift",
        flow="sft",
    ),
    Bug(
        "positions that do not restart",
        "plait.data.packed:pack",
        "range(len(prompt_ids), len(prompt_ids) + len(response_ids))",
        "range(len(token_ids) - len(response_ids), len(token_ids))",
        ("data/test_packed.py::test_by_hand",),
    ),
    Bug(
        "packing that leaks to siblings",
        "plait.models.compute.visibility:sees",
        "(query.group == key.group) & ((query.segment == key.segment) | (key.prompt == 1))",
        "(query.group == key.group)",
        ("models/compute/test_attention.py::test_every_cut_computes_the_dense_attention",),
    ),
)

LOSS = (
    Bug(
        "shifted mask",
        "plait.training.mini_batch:MiniBatch.share",
        'tensor(self.mask_R[places], "cpu")',
        'tensor(np.roll(self.mask_R, 1)[places], "cpu")',
        ("training/test_masks_and_pairs.py::test_gradients_equal_a_padded_batch",),
    ),
    Bug(
        "KL sign",
        f"{LOSSES}:kl_estimate",
        "(logprobs_R - ref_logprobs_R)",
        "(ref_logprobs_R - logprobs_R)",
        ("algorithms/test_losses.py::test_kl_estimators_by_hand",),
    ),
    Bug(
        "KL added to the reward",
        "plait.algorithms.kl:subtract_kl",
        "return score - kl_coef",
        "return score + kl_coef",
        ("algorithms/test_grpo.py::test_kl_in_the_reward_lowers_it",),
    ),
    Bug(
        "per-micro-batch mean",
        "plait.training.loss_batch:MicroBatchLoss.aggregate",
        "max(1, totals.tokens)",
        "max(1, len(values_R))",
        ("training/test_trainer.py::test_neither_gradient_nor_metric_depends_on_the_split",),
    ),
    Bug(
        "masked sequences in the denominator",
        "plait.training.token_means:MiniBatchTotals.of",
        "int((trained > 0).sum())",
        "len(trained)",
        ("training/test_loss_batch.py::test_totals_of_rows",),
    ),
    Bug(
        "ratio upside down",
        f"{LOSSES}:log_ratio",
        "batch.logprobs - old_logprobs_R",
        "old_logprobs_R - batch.logprobs",
        ("algorithms/test_losses.py::test_ratios_by_hand",),
    ),
    Bug(
        "clip that takes the larger gain",
        f"{LOSSES}:clipped_surrogate",
        "plain_R.minimum(",
        "plain_R.maximum(",
        ("algorithms/test_losses.py::test_clipping_by_hand",),
    ),
    Bug(
        "one clip for both sides",
        f"{LOSSES}:clipped_surrogate",
        "1 + clip_high",
        "1 + clip_low",
        ("algorithms/test_losses.py::test_clipping_by_hand",),
    ),
    Bug(
        "value clip that takes the smaller loss",
        f"{CRITIC}:value_loss",
        "loss_R.maximum(clipped_R)",
        "loss_R.minimum(clipped_R)",
        ("algorithms/test_ppo.py::test_the_value_loss_by_hand",),
    ),
    Bug(
        "value loss without its half",
        f"{CRITIC}:value_loss",
        "batch.aggregate(loss_R / 2,",
        "batch.aggregate(loss_R,",
        ("algorithms/test_ppo.py::test_the_value_loss_by_hand",),
    ),
    Bug(
        "chosen and rejected swapped",
        "plait.algorithms.dpo:dpo_loss",
        "chosen_P, rejected_P = batch.pairs(ratios_N)\n",
        "rejected_P, chosen_P = batch.pairs(ratios_N)\n",
        ("algorithms/test_dpo.py::test_dpo_by_hand",),
    ),
    Bug(
        "reward model that prefers the rejected",
        "plait.algorithms.reward_model:bradley_terry_loss",
        "chosen_P - rejected_P, chosen_P + rejected_P",
        "rejected_P - chosen_P, chosen_P + rejected_P",
        ("algorithms/test_reward_model.py::test_bradley_terry_by_hand",),
    ),
)

ADVANTAGE = (
    Bug(
        "double whitening",
        f"{ADVANTAGES}:scaled",
        "standardised(rewards_R, 1e-8) + rewards_R.mean()",
        "standardised(rewards_R, 1e-8)",
        ("algorithms/test_ppo.py::test_whitened_rewards_keep_their_mean",),
    ),
    Bug(
        "missing terminal bootstrap",
        f"{ADVANTAGES}:gae",
        "np.append(values[1:], value_after)",
        "np.append(values[1:], 0.0)",
        ("algorithms/test_ppo.py::test_gae_by_hand",),
    ),
    Bug(
        "bootstrap after EOS",
        f"{CRITIC}:if_truncated",
        "return 0.0 if finished else value",
        "return value",
        ("algorithms/test_ppo.py::test_nothing_follows_an_end_and_the_limit_is_no_end",),
    ),
    Bug(
        "GAE without gamma",
        f"{ADVANTAGES}:gae",
        "gamma * lam * following",
        "lam * following",
        ("algorithms/test_ppo.py::test_gae_by_hand",),
    ),
    Bug(
        "score at the first token",
        f"{CRITIC}:at_last_token",
        "rewards[-1:] = score",
        "rewards[:1] = score",
        ("algorithms/test_ppo.py::test_token_rewards_by_hand",),
    ),
    Bug(
        "standard deviation of the population",
        f"{ADVANTAGES}:standardised",
        "ddof=1",
        "ddof=0",
        ("algorithms/test_grpo.py::test_advantages_by_hand",),
    ),
    Bug(
        "dead groups that are not exactly zero",
        f"{ADVANTAGES}:standardised",
        "if len(values) < 2 or np.ptp(values) == 0:",
        "if len(values) < 2:",
        ("algorithms/test_advantages.py::test_a_batch_of_equal_returns_teaches_nothing",),
    ),
    Bug(
        "leave-one-out baseline that includes the sample",
        "plait.algorithms.rloo:leave_one_out_advantages",
        "centred(rewards) * len(rewards) / max(1, len(rewards) - 1)",
        "centred(rewards)",
        ("algorithms/test_rloo.py::test_leave_one_out_by_hand",),
    ),
    Bug(
        "greedy baseline added",
        "plait.algorithms.remax:over_greedy",
        "scores - greedy_scores[0]",
        "scores + greedy_scores[0]",
        ("algorithms/test_remax.py::test_over_greedy_by_hand",),
    ),
    Bug(
        "multiplier that falls under cost",
        "plait.algorithms.safe_rlhf:updated_log_lambda",
        "(mean_cost - threshold)",
        "(threshold - mean_cost)",
        ("algorithms/test_safe_rlhf.py::test_the_multiplier_by_hand",),
    ),
    Bug(
        "KL controller that steers away",
        "plait.algorithms.kl:adapted_kl_coef",
        "(1 + error *",
        "(1 - error *",
        ("algorithms/test_ppo.py::test_the_controller_by_hand",),
    ),
    Bug(
        "None counted as zero",
        "plait.rewards.scores:weighted_reward",
        "pairs = [(score, weight) for score, weight in zip(scores, weights, strict=True) if score is not None]",
        "pairs = [(score or 0.0, weight) for score, weight in zip(scores, weights, strict=True)]",
        ("rewards/test_statistics.py::test_weighted_reward",),
    ),
)

STATE = (
    Bug(
        "a step that is not finite is applied",
        f"{OPTIMIZER}.step",
        'if not (loss_is_finite and grad_norm < float("inf")):',
        "if False:",
        ("training/test_optimizer.py::test_a_step_that_is_not_finite_changes_nothing",),
    ),
    Bug(
        "masters that are never published",
        f"{OPTIMIZER}.step",
        "self._publish()",
        "pass",
        ("training/test_optimizer.py::test_masters_equal_plain_adamw",),
    ),
    Bug(
        "gradients that are not clipped",
        f"{OPTIMIZER}.step",
        "self.collected.own.mul_(self.settings.max_grad_norm / grad_norm)",
        "pass",
        ("training/test_optimizer.py::test_clipping_is_by_the_global_norm",),
    ),
    Bug(
        "a learning rate that stands still",
        f"{OPTIMIZER}.step",
        "self.attempted_steps += 1",
        "pass",
        ("training/test_optimizer.py::test_the_learning_rate_follows_attempted_steps",),
    ),
    Bug(
        "second moments lost in a resume",
        f"{OPTIMIZER}.load_state",
        "if state[name] is not buffer",
        'if name != "exp_avg_sq"',
        ("training/test_trainer.py::test_a_state_continues_bit_for_bit",),
    ),
    Bug(
        "data that begin again after a resume",
        "plait.runtime.session:Session._open",
        "prepared.feed(self.done.prompts_drawn)",
        "prepared.feed(0)",
        ("runs/test_flows.py::test_a_killed_run_resumes_exactly[ppo]",),
    ),
)

GENERATION = (
    Bug(
        "siblings that write into one block",
        "plait.generation.pool:KVPool.copy",
        "if not pairs or not self.layers:",
        "if pairs is not None:",
        ("generation/test_engine.py::test_float64_logprobs_are_the_trainers",),
    ),
    Bug(
        "a window of one token more",
        "plait.generation.paged:_seen",
        "positions_SR1 - of_keys_S1K < window",
        "positions_SR1 - of_keys_S1K <= window",
        ("generation/test_families.py::test_greedy_equals_transformers[mistral-torch.float64]",),
    ),
    Bug(
        "tokens that see the next one",
        "plait.generation.paged:_seen",
        "seen_SRK = places_K <= held_S11 + rows_R1",
        "seen_SRK = places_K <= held_S11 + rows_R1 + 1",
        ("generation/test_families.py::test_greedy_equals_transformers[llama-torch.float64]",),
    ),
    Bug(
        "siblings of a tree that see each other",
        "plait.kernels.paged_attention:seen_rows",
        "np.tri(count, dtype=np.uint8) if tree is None else tree.numpy().astype(np.uint8)",
        "np.tri(count, dtype=np.uint8)",
        ("generation/test_trees.py::test_by_the_module[llama-torch.float32]",),
    ),
    Bug(
        "prefix keys of a block alone",
        "plait.policy.blocks:prefix_keys",
        "digest + tokens",
        "tokens",
        ("generation/test_fast_path.py::test_a_prefix_is_all_that_stands_before",),
    ),
    Bug(
        "prefixes of old weights under new ones",
        "plait.policy.batching:Scheduler.forget",
        "item.is_current = not item.table",
        "item.is_current = True",
        ("policy/test_batching.py::test_what_older_weights_computed_is_not_found",),
    ),
    Bug(
        "rows before those that they read",
        "plait.generation.forward:Forward.logits",
        "if self._prepared.by_rank:",
        "if True:",
        ("generation/test_fast_path.py::test_who_reads_what_another_computes_in_the_step_stands_behind_it",),
    ),
    Bug(
        "tokens of new weights stamped with the old version",
        "plait.generation.response:Response.new_version",
        "(len(self.token_ids), version)",
        "(len(self.token_ids) + 1, version)",
        ("generation/test_open_loop.py::test_weights_that_change_in_flight",),
    ),
    Bug(
        "keys and values of old weights under new ones",
        "plait.generation.state:EngineState._recompute",
        "self.scheduler.recompute()",
        "self.scheduler.forget()",
        ("generation/test_open_loop.py::test_weights_that_change_in_flight[recompute]",),
    ),
    Bug(
        "drafts that count whatever was drawn",
        "plait.generation.drawing:accepted",
        "token_ids[stop - 1] != drafted",
        "drafted < 0",
        ("generation/test_drafts.py::test_drafts_change_no_token[wide-0.6]",),
    ),
    Bug(
        "wrong drafts that are taken for computed",
        "plait.generation.drawing:Drawing.end",
        "if new > count",
        "if new < count",
        ("generation/test_drafts.py::test_drafts_change_no_token[chunks-0.6]",),
    ),
    Bug(
        "exact mode that is not on",
        "plait.generation.forward:Forward.__init__",
        "ExactForward(model, pool, computes) if exact else None",
        "None",
        ("generation/test_exact.py::test_the_same_bits_in_any_company[llama-torch.bfloat16]",),
    ),
)

BUGS = (*SAMPLING, *LOSS, *ADVANTAGE, *STATE, *GENERATION)
