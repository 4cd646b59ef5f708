"""A frontend of several processes: the parent, which owns shared resources, and its children.

Free of vLLM, so that the parent starts at once.
"""

from frontend.processes.child import MEMBER
from frontend.processes.messages import Plan
from frontend.processes.parent import ProcessesSettings, run_processes
from frontend.processes.siblings import Siblings
