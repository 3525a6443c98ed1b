mod crash;
mod disk;
mod vfs;
