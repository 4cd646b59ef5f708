"""Who may use the API and who may manage the frontend."""
