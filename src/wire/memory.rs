//! An in-memory link for tests.
