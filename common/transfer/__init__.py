"""Processed tensors from the frontend to a worker: interfaces and transports.

- :mod:`base`: ``MmKwargsSender``, ``MmKwargsReceiver``, ``MediaHandle``, ``Received``,
  ``receive_all``, ``join_frames``
- :mod:`metadata`: ``TransferMetadata``, ``encode_metadata``, ``decode_metadata``
- :mod:`choice`: ``choose_transport``, ``SenderSet``, ``ReceiverSet``
- :mod:`arena`: ``Arena``, ``Lease``; :mod:`arena_layout`: ``ArenaOffer``;
  :mod:`arena_mapping`: ``ArenaMapping``; :mod:`arena_file`: ``reap_orphans``
- transports: :mod:`shm` (``ShmSender``, ``ShmReceiver``), :mod:`nixl` (``NixlSender``,
  ``NixlReceiver``), :mod:`inline` (``InlineSender``, ``InlineReceiver``), :mod:`reference`
  (``refer``, ``ReferenceReceiver``), :mod:`memory` (``MemorySender``, ``MemoryReceiver``)
- :mod:`handshake`: ``TransferOffer``, ``TransferReply``
- NIXL, none of it in the frontend's or the worker's own process: :mod:`nixl_server` serves the
  arena, :mod:`nixl_reader` reads for a worker, :mod:`nixl_process` looks after them
- :mod:`codec`: ``encode``, ``decode``
"""
