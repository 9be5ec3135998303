"""Messages of agents: validated, and stored with their receipts."""
