"""Many tasks in one vLLM engine: a plugin that injects per request, in vLLM's own batches.

vLLM loads it where ``VLLM_PLUGINS`` names ``i2cl``. Without vLLM only what needs none of it can be used.
"""

from i2cl.interfaces.vllm.frontend import Answer as Answer, classify as classify, drop as drop, load as load
