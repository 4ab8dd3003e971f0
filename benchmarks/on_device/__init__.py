"""Parts of `gpu.py`: each is a process of its own, `python -m on_device.PART JOB.json`, and prints what it measured."""
