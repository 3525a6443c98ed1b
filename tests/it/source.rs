//! The repository's own files, for the tests that read them.

use std::path::{Path, PathBuf};

/// The repository's root.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A file's text, by its path from the root.
pub fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// A Rust file without its comments and its unit tests: what other code can see of it.
pub struct Code {
    /// Its path from `src/`, such as `session/driver.rs`.
    pub path: String,
    /// What is left of its text.
    pub text: String,
}

impl Code {
    /// The first folder, or the file's stem where it lies in `src/` itself.
    pub fn module(&self) -> &str {
        self.path.split(['/', '.']).next().unwrap_or_default()
    }

    /// Modules of this crate that the file names, in a `use` or in a path.
    pub fn modules_named(&self) -> Vec<String> {
        // As many `super::` as the file lies deep lead to the crate's root.
        let depth = self.path.trim_end_matches("/mod.rs").split('/').count();
        let mut names = Vec::new();
        for anchor in ["crate::".to_owned(), "bcd::".to_owned(), "super::".repeat(depth)] {
            for (at, _) in self.text.match_indices(&anchor) {
                let rest = &self.text[at + anchor.len()..];
                match rest.strip_prefix('{') {
                    Some(group) => names.extend(heads(group)),
                    None => names.extend(head(rest)),
                }
            }
        }
        names
    }
}

/// The text of every Rust file below `src/` and `tests/`, tests and all.
pub fn everything() -> String {
    let mut files = Vec::new();
    ["src", "tests"].iter().for_each(|folder| walk(&root().join(folder), &mut files));
    files.iter().map(|path| std::fs::read_to_string(path).expect("a readable source file")).collect()
}

/// Every Rust file below `src/`.
pub fn code() -> Vec<Code> {
    let src = root().join("src");
    let mut files = Vec::new();
    walk(&src, &mut files);
    files.sort();
    let strip = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).expect("a readable source file");
        let within = path.strip_prefix(&src).expect("below src").to_string_lossy().into_owned();
        Code { path: within, text: without_comments_and_tests(&text) }
    };
    files.into_iter().filter(|path| !is_test_file(path)).map(strip).collect()
}

fn is_test_file(path: &Path) -> bool {
    path.file_stem().is_some_and(|stem| stem == "tests") || path.iter().any(|part| part == "tests")
}

fn walk(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).expect("a readable folder") {
        let path = entry.expect("a readable entry").path();
        if path.is_dir() {
            walk(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

fn without_comments_and_tests(text: &str) -> String {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = code.lines().map(|line| line.split_once("//").map_or(line, |(before, _)| before));
    lines.collect::<Vec<_>>().join("\n")
}

fn head(text: &str) -> Option<String> {
    let name: String = text.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
    (!name.is_empty() && name != "super").then_some(name)
}

/// The first name of each item of a use group, up to its closing brace.
fn heads(group: &str) -> Vec<String> {
    let (mut depth, mut start, mut names) = (0_i32, true, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '}' if depth == 0 => break,
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => start = true,
            c if start && !c.is_whitespace() => {
                names.extend(head(&group[at..]));
                start = false;
            }
            _ => {}
        }
    }
    names
}

#[test]
fn names_are_found_in_groups_and_paths() {
    let code = Code {
        path: "node.rs".into(),
        text: "use crate::{gateway::{a, b},\n  wire, sim::Fleet};\nlet x = crate::cli::run();".into(),
    };
    assert_eq!(code.modules_named(), ["gateway", "wire", "sim", "cli"]);
    assert_eq!(code.module(), "node");
}

#[test]
fn a_relative_path_counts_when_it_leads_to_the_root() {
    let named = |path: &str, text: &str| Code { path: path.into(), text: text.into() }.modules_named();
    assert_eq!(named("gateway/service.rs", "use super::session;"), [""; 0]);
    assert_eq!(named("gateway/service.rs", "use super::super::session;"), ["session"]);
    assert_eq!(named("gateway/mod.rs", "use super::session;"), ["session"]);
    assert_eq!(named("gateway.rs", "use super::session;"), ["session"]);
}
