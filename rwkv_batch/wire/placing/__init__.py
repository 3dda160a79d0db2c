"""Which engine of a host gets a request, and the table of sessions that its front ends share."""
