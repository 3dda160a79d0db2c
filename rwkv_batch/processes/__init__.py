"""What the processes of the server have around them: streams for the log, files, folders."""
