//! The `bcd` program: argv → log → runtime → one call → exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(bcd::cli::run(std::env::args_os()).code())
}
