"""PyTorch's test helpers import expecttest, which only `make engines` installs. Without it, the tests here skip."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("expecttest") else ["optimizers.py", "state_dicts.py", "torch_optim.py"]
