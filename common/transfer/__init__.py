"""Processed tensors from the frontend to a worker: interfaces and transports.

- :mod:`base`: the interface of a sender and a receiver
- :mod:`transports`: every transport (:mod:`shm`, :mod:`nixl` (a folder), :mod:`inline`), and which
  one is taken
- :mod:`handshake`: what both ends offer and prove
- :mod:`codec`: an item to bytes and back; :mod:`metadata`: what is sent in place of its tensors
- :mod:`arena`, a folder: the frontend's shared memory, which :mod:`shm` and :mod:`nixl` lease from
- :mod:`shared_arena`, a folder: one arena for all processes of a frontend
- :mod:`nixl_processes`, a folder: the processes that hold NIXL's agents, apart from the frontend's
  and the worker's own
"""
