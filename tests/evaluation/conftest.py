"""lm-eval describes the machine after every task, by starting a dozen programs; no test reads that."""

from torch.utils import collect_env

collect_env.get_pretty_env_info = lambda: "not described"
