//! `bcd bench`: what the node costs, each figure a ratio of two things measured side by side in one run.
//!
//! An absolute time says more about the machine, and about who else uses it, than about the program. So each round
//! measures the thing and its floor one after the other, and what is held against an aim is the median of the rounds'
//! ratios. The journal's figures are of use on a host's own disk, so they are in every build; those that need a gateway
//! are in simulation builds.

#[cfg(feature = "fakehw")]
pub mod agent;
mod figure;
mod fill;
#[cfg(feature = "fakehw")]
pub mod fleet;
#[cfg(feature = "fakehw")]
pub mod gateway;
pub mod journal;
#[cfg(feature = "fakehw")]
mod lab;
mod place;
#[cfg(feature = "fakehw")]
mod proc;
mod raw;
#[cfg(feature = "fakehw")]
pub mod rehome;
#[cfg(feature = "fakehw")]
pub mod session;

pub use figure::{Aim, Figure, Part, json, table};
pub use place::{Place, PlaceError};

/// Runs all of them at once and gives what they give, or the first error.
async fn all<T: Send + 'static, E: Send + 'static>(
    work: impl Iterator<Item = impl Future<Output = Result<T, E>> + Send + 'static>,
) -> Result<Vec<T>, E> {
    let mut tasks: tokio::task::JoinSet<_> = work.collect();
    let mut values = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        match ended {
            Ok(value) => values.push(value?),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
    Ok(values)
}
