//! The hands: what fills the sockets of [`crate::ports`] on a machine.

#[cfg(feature = "fakehw")]
pub mod fake_machine;
pub mod machine;
pub mod reboot;
pub mod tcp;
