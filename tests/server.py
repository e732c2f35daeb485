"""First import of the server that `tests.children` forks; children enable collections again."""

import gc
import os

gc.disable()
# Its children need no GPU, and one takes seconds to wake. A server that has looked for GPUs spoils its forks.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
