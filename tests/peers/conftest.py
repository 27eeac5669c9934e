"""PyTorch's own test helpers import expecttest, which only `make engines` installs: without it nothing here is collected
but the tests, which skip.
"""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("expecttest") else ["optimizers.py", "torch_optim.py"]
