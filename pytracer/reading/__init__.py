"""What can be asked of a trace and of a job."""
