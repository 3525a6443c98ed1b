//! kill -9 of the real binary at every named step of a command's life, and at random moments.
