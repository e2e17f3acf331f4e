"""From a trace to answers: lifetimes, categories, timeline, ledger and views."""
