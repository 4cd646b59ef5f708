"""What the frontend and the workers share: messages, cards, transfer, discovery.

Nothing here knows how a request is routed or how an engine runs.
"""
