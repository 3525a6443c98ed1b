//! Counts what a thread takes from the allocator: a length that a peer claims must not be believed.

#![allow(unsafe_code, reason = "an allocator is unsafe by its trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static MOST: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, counted by thread. What another thread gives back is not missed here.
pub struct Counting;

fn took(bytes: usize) {
    // A thread that ends allocates when its cells may be gone.
    let _ = HELD.try_with(|held| {
        held.set(held.get().saturating_add(bytes));
        let _ = MOST.try_with(|most| most.set(most.get().max(held.get())));
    });
}

fn gave(bytes: usize) {
    let _ = HELD.try_with(|held| held.set(held.get().saturating_sub(bytes)));
}

// SAFETY: every call is the system allocator's own; the cells beside it allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        gave(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both exist for a moment, unless the allocator is lucky.
        took(size);
        gave(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// What `work` gives, and the most bytes that it held at once beyond what was held before.
pub fn most<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.with(Cell::get);
    MOST.with(|most| most.set(before));
    let done = work();
    (done, MOST.with(Cell::get) - before)
}

#[test]
fn what_is_held_at_once_is_counted_and_what_was_given_back_is_not() {
    let ((), held) = most(|| drop(vec![0_u8; 1 << 20]));
    assert!((1 << 20..3 << 19).contains(&held), "{held}");
    let ((), held) = most(|| (0..100).for_each(|_| drop(std::hint::black_box(vec![0_u8; 1 << 16]))));
    assert!((1 << 16..1 << 17).contains(&held), "{held}");
}
