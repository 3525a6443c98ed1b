B
stoppingstop