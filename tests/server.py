"""First import of the server that `tests.children` forks; children enable collections again."""

import gc

gc.disable()
