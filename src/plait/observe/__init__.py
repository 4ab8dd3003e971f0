"""What a run tells about itself: logs, live progress, trackers, Chrome traces.

* `run_log`: append-only JSONL files that know their length, so that a resumed run cuts them back exactly.
* `beside_steps`: seconds of evaluations, saving and compiling; `progress`: the live display on a terminal; one plain
  line per step elsewhere.
* `trackers`: TensorBoard and Weights & Biases, off unless asked for.
* `trace`: the Chrome trace file of a timeline.
* `doctor`: rules over what a step says of itself (`doctor_reading`, `doctor_rules`, `doctor_agreement`,
  `doctor_training`), by what a user sets (`doctor_settings`).
* `console`, `screen`: what is printed, and text made safe for it; `loading`: what a command waits for at its start.

Enters: names and plain numbers. Leaves: files and lines on stderr. Imports `output`, `file_writes`, `settings`,
`json_text` and `errors`; no torch (a tracker that is switched on brings its own imports when it is opened).
"""
