"""Other hosts: workers READ from the frontend's arena over NIXL."""

from common.transfer.nixl.receiver import NixlReceiver
from common.transfer.nixl.sender import LateNixl
