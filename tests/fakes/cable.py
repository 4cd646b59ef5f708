"""A bad cable: takes frames from either of two network devices to the other, late or not at all.

    python -m tests.fakes.cable DELAY_S LOSS DEVICE DEVICE
    python -m tests.fakes.cable --small-frames DEVICE

For kernels without netem. The second form has a device send frames of the size that a wire takes,
with their checksums, instead of leaving both to who comes next. The first one says ``ready`` and
ends with its standard input.
"""

import ctypes
import fcntl
import heapq
import itertools
import random
import select
import socket
import struct
import sys
import time

_EVERYTHING = 3  # ETH_P_ALL
_SOL_PACKET = 263
_PACKET_IGNORE_OUTGOING = 23
_SIOCETHTOOL = 0x8946
_ETHTOOL_OFF = (0x17, 0x1F, 0x24)  # checksums, then segmentation: of TCP, and of anything

_SEED = 20
_BUFFER = 64 << 20


def small_frames(device: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for command in _ETHTOOL_OFF:
            value = ctypes.create_string_buffer(struct.pack("=II", command, 0))
            request = struct.pack("16sP16x", device.encode(), ctypes.addressof(value))
            fcntl.ioctl(handle, _SIOCETHTOOL, request)


def plugged(device: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERYTHING))
    end.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    end.bind((device, 0))
    return end


def carry(delay_s: float, loss: float, devices: list[str]) -> None:
    chance = random.Random(_SEED)
    one, other = (plugged(device) for device in devices)
    across = {one: other, other: one}
    order = itertools.count()
    under_way: list[tuple[float, int, socket.socket, bytes]] = []
    print("ready", flush=True)
    while True:
        wait = None if not under_way else max(0.0, under_way[0][0] - time.monotonic())
        ready, _, _ = select.select([one, other, sys.stdin], [], [], wait)
        if sys.stdin in ready:
            return
        for end in (each for each in across if each in ready):
            frame = end.recv(1 << 16)
            if chance.random() >= loss:
                due = time.monotonic() + delay_s
                heapq.heappush(under_way, (due, next(order), across[end], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(under_way)
            end.send(frame)


if __name__ == "__main__":
    if sys.argv[1] == "--small-frames":
        small_frames(sys.argv[2])
    else:
        carry(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
