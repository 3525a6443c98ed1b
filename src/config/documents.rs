//! The table of keys as documents: for docs/config.md, for /etc/bcd/bcd.toml and for bcd.toml(5).

use super::{Config, KEYS, Key};

/// Of a production build, whichever build the text is made by.
fn allowed(key: &Key) -> &'static str {
    key.allowed.trim_end_matches(", none")
}

fn default(key: &Key) -> String {
    (key.show)(&Config::defaults()).to_string()
}

/// The table of keys in Markdown, as docs/config.md shows it.
pub fn reference() -> String {
    let mut out =
        String::from("| key | variable | default | allowed | what it does |\n|---|---|---|---|---|\n");
    for key in &KEYS {
        let Key { name, variable, meaning, .. } = key;
        let (default, allowed) = (default(key), allowed(key));
        out.push_str(&format!("| `{name}` | `{variable}` | `{default}` | {allowed} | {meaning} |\n"));
    }
    out
}

/// A bcd.toml that changes nothing: every key is there, as a comment, with its default.
pub fn sample() -> String {
    let mut out = String::from(
        "# Configuration of bcd; bcd.toml(5) says more. Each key stands here with its default.\n\
         # After a change:  bcd config check && systemctl restart bcd\n",
    );
    let mut section = "";
    for key in &KEYS {
        if key.section() != section {
            section = key.section();
            out.push_str(&format!("\n[{section}]\n"));
        }
        let short = key.name.split_once('.').map_or(key.name, |(_, short)| short);
        let (default, allowed) = (default(key), allowed(key));
        out.push_str(&format!("# {}.\n# Allowed: {allowed}.\n#{short} = {default}\n", key.meaning));
    }
    out
}

/// bcd.toml(5), in roff.
pub fn manual() -> String {
    let mut out = format!(
        ".TH bcd.toml 5 \"\" \"bcd {version}\" \"File Formats\"\n\
         .SH NAME\nbcd.toml \\- configuration of bcd\n\
         .SH SYNOPSIS\n.I /etc/bcd/bcd.toml\n\
         .SH DESCRIPTION\n\
         A TOML file. It may be missing; each key has a default. An unknown key or a wrong value ends\n\
         .BR bcd (1)\nwith exit code 78 and a line that names it.\n\
         A flag stands over a variable of the environment, that over the file.\n\
         In a variable the items of a list are separated by commas.\n\
         .SH KEYS\n",
        version = env!("CARGO_PKG_VERSION"),
    );
    for key in &KEYS {
        let line = |label: &str, text: &str| format!(".br\n{label}: {}\n", roff(text));
        out.push_str(&format!(".TP\n.B {}\n{}.\n", roff(key.name), roff(key.meaning)));
        out.push_str(&line("Allowed", allowed(key)));
        out.push_str(&line("Default", &default(key)));
        out.push_str(&line("Variable", key.variable));
    }
    out.push_str(".SH SEE ALSO\n.BR bcd (1),\n.BR bcd\\-config (1)\n");
    out
}

/// Escapes what roff would read as a request, a hyphen or an escape of its own.
fn roff(text: &str) -> String {
    let escaped = text.replace('\\', "\\e").replace('-', "\\-");
    if escaped.starts_with(['.', '\'']) { format!("\\&{escaped}") } else { escaped }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn read(text: &str) -> Config {
        let mut config = Config::defaults();
        config.apply_file(Path::new("bcd.toml"), text).unwrap();
        config
    }

    fn values(config: &Config) -> Vec<String> {
        config.effective().into_iter().map(|(_, value, _)| value).collect()
    }

    #[test]
    fn the_sample_changes_nothing_and_its_comments_are_the_defaults() {
        let defaults = values(&Config::defaults());
        assert_eq!(values(&read(&sample())), defaults);
        let with_keys: String = sample()
            .lines()
            .map(|line| line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(line))
            .map(|line| format!("{line}\n"))
            .collect();
        let config = read(&with_keys);
        assert_eq!(values(&config), defaults);
        let from_file =
            config.effective().iter().filter(|(_, _, source)| source.to_string() == "bcd.toml").count();
        assert_eq!(from_file, KEYS.len(), "every key is in it");
    }

    #[test]
    fn the_manual_names_every_key_and_holds_no_stray_request() {
        let manual = manual();
        for key in &KEYS {
            assert!(manual.contains(&format!(".B {}\n", key.name)), "{}", key.name);
        }
        let requests = [".TH", ".SH", ".TP", ".B", ".BR", ".br", ".I"];
        for line in manual.lines().filter(|line| line.starts_with(['.', '\''])) {
            assert!(requests.contains(&line.split(' ').next().unwrap()), "{line}");
        }
    }
}
