//! What led to a failure, out of a virtual run's log: the invariant's sentence, and what the node involved did before
//! and after.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::virtual_time::log::BROKEN;

/// Lines that are shown before the moment of a failure, and behind it.
const BEFORE: usize = 40;
const AFTER: usize = 15;
/// Failures that are explained: one cause often has many.
const FAILURES: usize = 5;

/// The log around each of the first failures.
pub fn explain(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    let (broken, told): (Vec<&str>, Vec<&str>) = lines.iter().partition(|line| line.contains(BROKEN));
    let mut text = String::new();
    if broken.is_empty() {
        return "nothing in this log failed\n".to_owned();
    }
    for sentence in broken.iter().take(FAILURES) {
        let sentence = sentence.split_once(BROKEN).map_or(*sentence, |(_, sentence)| sentence.trim());
        // Writing into a string cannot fail.
        let _ = writeln!(text, "{sentence}\n");
        around(&told, sentence, &mut text);
        text.push('\n');
    }
    if broken.len() > FAILURES {
        let _ = writeln!(text, "and {} more", broken.len() - FAILURES);
    }
    text
}

/// Words of a sentence that stand for something in the log: ids have a dash, as agents in the log have.
fn names(sentence: &str) -> Vec<&str> {
    let word = |word: &str| word.contains('-') && word.chars().any(|c| c.is_ascii_digit());
    let edges = |c: char| !c.is_ascii_alphanumeric();
    let mut names: Vec<&str> = sentence.split_whitespace().map(|text| text.trim_matches(edges)).collect();
    names.retain(|name| word(name));
    names
}

/// Whose a line is.
fn who(line: &str) -> &str {
    line.split_whitespace().nth(1).unwrap_or_default()
}

fn around(lines: &[&str], sentence: &str, text: &mut String) {
    let names = names(sentence);
    let names_one = |line: &str| names.iter().any(|name| line.contains(name));
    // Whoever speaks of them is involved; gateways speak of everybody.
    let involved: BTreeSet<&str> = lines
        .iter()
        .filter(|line| names_one(line))
        .map(|line| who(line))
        .filter(|who| who.starts_with("agent-"))
        .collect();
    let concerns = |line: &&&str| names_one(line) || involved.contains(who(line));
    let mine: Vec<&&str> = lines.iter().filter(concerns).collect();
    // The moment is the last word on the first name, such as a command's end.
    let first = names.first().copied().unwrap_or_default();
    let Some(moment) = mine.iter().rposition(|line| !first.is_empty() && line.contains(first)) else {
        let _ = writeln!(text, "the log has nothing of it");
        return;
    };
    let from = moment.saturating_sub(BEFORE);
    let to = (moment + AFTER).min(mine.len().saturating_sub(1));
    for (at, line) in mine.iter().enumerate().take(to + 1).skip(from) {
        let mark = if at == moment { '>' } else { ' ' };
        let _ = writeln!(text, "{mark} {line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> String {
        let mut log = String::new();
        for n in 0..100 {
            let _ = writeln!(log, "{n:>10} agent-1 exec started id=c-other{n}");
            let _ = writeln!(log, "{n:>10} agent-2 exec busy n={n}");
        }
        log.push_str("       500 agent-2 exec started id=c-7f attempt=1\n");
        log.push_str("       600 gateway-0 session ended node=n-12\n");
        log.push_str("       700 agent-2 exec started id=c-7f attempt=2\n");
        log.push_str("       800 agent-2 session ended\n");
        log
    }

    #[test]
    fn a_failure_is_shown_with_what_its_node_did_and_nothing_of_others() {
        let log = log() + "       900 sim BROKEN I2 c-7f may not run twice and ran 2 times\n";
        let text = explain(&log);
        assert!(text.starts_with("I2 c-7f may not run twice and ran 2 times\n"), "{text}");
        assert!(text.contains(">        700 agent-2 exec started id=c-7f attempt=2\n"), "{text}");
        assert!(text.contains("800 agent-2 session ended"), "{text}");
        assert!(!text.contains("agent-1") && !text.contains("n=10\n"), "{text}");
        assert!(text.contains("n=99\n"), "{text}");
    }

    #[test]
    fn a_log_without_a_failure_says_so() {
        assert_eq!(explain(&log()), "nothing in this log failed\n");
    }
}
