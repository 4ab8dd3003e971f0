"""Generation by vLLM, in an environment and a process of its own, behind `engines.GenerationEngine`.

`environment` finds the Python that vLLM is installed for, and says how to make one; `process` starts vLLM there.
`engine` is the leader's side; `server` the other, which runs in that environment and loads plait's own files and none
of its packages: it may import `launch`, `kernels`, `generation.sampler` and `generation.stopping`, and vLLM within
functions. `keyed_noise` has vLLM draw what plait's sampler draws. `messages` is what both say to each other, over the
connection of a launched worker; weights go through shared memory (`shared_weights`), hashed on both sides.

Enter: requests, and a model's weights by their names in Transformers. Leave: samples.
"""
