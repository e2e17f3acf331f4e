"""What people ask of a trace."""
