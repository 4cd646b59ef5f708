"""Transfer of processed tensors from the frontend to a worker: interfaces and transports.

- :mod:`base`: the interfaces of a sender and a receiver
- :mod:`transports`: every transport (:mod:`shm`, :mod:`nixl`, :mod:`inline`), and the choice
- :mod:`handshake`: offers and proofs of both ends
- :mod:`codec`: an item to bytes and back; :mod:`metadata`: its description on the request plane
- :mod:`arena`: the frontend's shared memory, which :mod:`shm` and :mod:`nixl` lease from
- :mod:`shared_arena`: one arena for all processes of a frontend
- :mod:`nixl_processes`: the processes with NIXL agents, apart from the frontend's and the worker's
"""
