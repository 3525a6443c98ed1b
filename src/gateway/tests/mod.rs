//! The gateway as a node sees it: over a real socket, with frames of the test's own making.

mod lab;

mod commands;
mod endings;
mod enrolment;
mod events;
mod rejoins;
mod results;
mod sessions;
mod several;
