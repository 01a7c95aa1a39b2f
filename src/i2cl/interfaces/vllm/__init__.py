"""vLLM plugin: serve many tasks from one engine, with a per-request edit in vLLM's own batches.

vLLM loads the plugin if ``VLLM_PLUGINS`` contains ``i2cl``. This package can be imported without vLLM.
"""

from i2cl.interfaces.vllm.frontend import Answer as Answer, classify as classify, drop as drop, load as load
