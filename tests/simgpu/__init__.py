"""vLLM engines whose GPU is the clock: everything of vLLM runs but the model. See README.md.

    --distributed-executor-backend=tests.simgpu.executor.SimExecutor

Nothing is exported here, so that who starts engines or reads their totals need not import vLLM.
"""
