"""Processed tensors from the frontend to a worker: interfaces and transports.

- :mod:`base`: ``MmKwargsSender``, ``MmKwargsReceiver``, ``MediaHandle``, ``Received``,
  ``join_frames``
- :mod:`metadata`: ``TransferMetadata``, ``encode_metadata``, ``decode_metadata``
- :mod:`choice`: ``choose_transport``, ``SenderSet``, ``ReceiverSet``
- :mod:`codec`: ``encode``, ``decode``
- :mod:`handshake`: ``TransferOffer``, ``TransferReply``
- :mod:`registry`: every transport, by its two ends: :mod:`shm`, :mod:`nixl`, :mod:`inline`,
  :mod:`reference`
- :mod:`arena`, a folder: the frontend's shared memory, which :mod:`shm` and :mod:`nixl` lease from
- :mod:`nixl_processes`, a folder: the processes that hold NIXL's agents, none of which is in the
  frontend's or the worker's own process
"""
