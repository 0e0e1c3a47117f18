import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `ranks`, which the processes it starts import by name as well
