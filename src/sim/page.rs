//! The report as a page: the closing table, and what happened second by second as plots. One file, no script, nothing
//! fetched from elsewhere.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::history::{Evidence, Struck};
use super::report::{Report, Samples};

const WIDTH: usize = 860;
const HEIGHT: usize = 150;
/// Room for the numbers at the left.
const LEFT: usize = 60;

const STYLE: &str = "body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:940px;padding:0 1em}\
pre{background:#f4f4f4;padding:1em;overflow-x:auto;font-size:12px}h2{font-size:15px;margin:1.6em 0 .2em}\
svg{width:100%;height:auto}text{font:11px system-ui,sans-serif;fill:#555}\
@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}pre{background:#222}text{fill:#aaa}}";

/// Values second by second, from the start of the run.
struct Line {
    name: &'static str,
    color: &'static str,
    values: Vec<i64>,
}

/// The page.
pub fn page(report: &Report, evidence: &Evidence) -> String {
    let seconds = Seconds::of(evidence);
    let mut html = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>bcd sim, seed {}</title><style>{STYLE}</style>\
         <h1>bcd sim, seed {}</h1><pre>{}</pre>",
        report.options.seed,
        report.options.seed,
        escaped(&report.table())
    );
    let rows = || evidence.commands.iter();
    let commands = [
        seconds.count("handed over", "#888", rows().map(|row| row.enqueued_ms)),
        seconds.count("ended", "#2a7", rows().map(|row| row.ended_ms)),
    ];
    plot(&mut html, "Commands a second", &commands);
    let accepted = |row: &crate::gateway::control::CommandView| {
        let known = row.dispatched_ms > 0 && row.accepted_ms > 0;
        known.then(|| (row.accepted_ms, (row.accepted_ms - row.dispatched_ms).max(0)))
    };
    let latency = [
        seconds.percentile("p50", "#27c", 50, rows().filter_map(accepted)),
        seconds.percentile("p99", "#c72", 99, rows().filter_map(accepted)),
    ];
    plot(&mut html, "First dispatch to ACCEPTED, ms, by the second of the answer", &latency);
    let sessions = |kind: &'static str| {
        evidence.events.iter().filter(move |event| event.kind == kind).map(|event| event.at_ms)
    };
    let sessions = [
        seconds.count("connected", "#2a7", sessions("node.connected")),
        seconds.count("disconnected", "#c33", sessions("node.disconnected")),
    ];
    plot(&mut html, "Sessions begun and ended a second, as the gateways saw them", &sessions);
    let struck = |gateway: bool| {
        let of_gateway = move |what: &Struck| matches!(what, Struck::Gateway(..)) == gateway;
        let meant = evidence.moments.iter().filter(move |moment| of_gateway(&moment.what));
        meant.map(|moment| moment.at_ms)
    };
    let faults =
        [seconds.count("agents", "#c72", struck(false)), seconds.count("gateways", "#c33", struck(true))];
    plot(&mut html, "Faults a second", &faults);
    html.push_str("</html>\n");
    html
}

/// The seconds of a run, by the machine's wall clock.
struct Seconds {
    start_ms: i64,
    count: usize,
}

impl Seconds {
    fn of(evidence: &Evidence) -> Self {
        let times = evidence.commands.iter().flat_map(|row| [row.enqueued_ms, row.ended_ms]);
        let times = times.chain(evidence.events.iter().map(|event| event.at_ms)).filter(|at| *at > 0);
        let (first, last) = times.fold((i64::MAX, 0), |(first, last), at| (first.min(at), last.max(at)));
        let count = usize::try_from((last.saturating_sub(first)) / 1000 + 1).unwrap_or(1).max(1);
        Self { start_ms: first, count }
    }

    fn second(&self, at_ms: i64) -> Option<usize> {
        let since = at_ms.checked_sub(self.start_ms)?;
        usize::try_from(since / 1000).ok().filter(|second| since >= 0 && *second < self.count)
    }

    fn count(&self, name: &'static str, color: &'static str, times: impl Iterator<Item = i64>) -> Line {
        let mut values = vec![0; self.count];
        times.filter_map(|at| self.second(at)).for_each(|second| values[second] += 1);
        Line { name, color, values }
    }

    fn percentile(
        &self,
        name: &'static str,
        color: &'static str,
        percent: usize,
        samples: impl Iterator<Item = (i64, i64)>,
    ) -> Line {
        let mut by_second = BTreeMap::<usize, Vec<i64>>::new();
        for (at, value) in samples {
            if let Some(second) = self.second(at) {
                by_second.entry(second).or_default().push(value);
            }
        }
        let mut values = vec![0; self.count];
        for (second, samples) in by_second {
            values[second] = Samples::new(samples).percentile(percent).unwrap_or(0);
        }
        Line { name, color, values }
    }
}

fn plot(html: &mut String, title: &str, lines: &[Line]) {
    let top = lines.iter().flat_map(|line| &line.values).copied().max().unwrap_or(0).max(1);
    let seconds = lines.iter().map(|line| line.values.len()).max().unwrap_or(1);
    let _ = write!(
        html,
        "<h2>{}</h2><svg viewBox=\"0 0 {} {}\" role=\"img\"><text x=\"0\" y=\"12\">{top}</text>\
         <text x=\"0\" y=\"{}\">0</text><text x=\"{}\" y=\"{}\" text-anchor=\"end\">{seconds} s</text>\
         <path d=\"M{LEFT} 4V{HEIGHT}H{}\" fill=\"none\" stroke=\"#aaa\"/>",
        escaped(title),
        LEFT + WIDTH,
        HEIGHT + 20,
        HEIGHT,
        LEFT + WIDTH,
        HEIGHT + 16,
        LEFT + WIDTH,
    );
    for (nth, line) in lines.iter().enumerate() {
        let mut points = String::new();
        for (second, value) in line.values.iter().enumerate() {
            let x = LEFT + second * WIDTH / seconds.max(1);
            let high = usize::try_from(value.saturating_mul(146) / top).unwrap_or(0);
            let _ = write!(points, "{x},{} ", HEIGHT - high.min(HEIGHT));
        }
        let _ = write!(
            html,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\"/><text x=\"{}\" y=\"12\" style=\"fill:{}\">{}</text>",
            points.trim_end(),
            line.color,
            LEFT + 10 + nth * 110,
            line.color,
            escaped(line.name),
        );
    }
    html.push_str("</svg>");
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stand_in_their_second_and_times_outside_the_run_nowhere() {
        let seconds = Seconds { start_ms: 1000, count: 3 };
        let line = seconds.count("n", "#000", [1000, 1999, 3500, 999, 4000, 0].into_iter());
        assert_eq!(line.values, [2, 0, 1]);
        let line = seconds.percentile("n", "#000", 99, [(1000, 5), (1500, 9), (2000, 4)].into_iter());
        assert_eq!(line.values, [9, 4, 0]);
    }

    #[test]
    fn a_page_is_whole_without_a_script_and_lets_no_markup_through() {
        let mut html = String::new();
        plot(&mut html, "a<b", &[Line { name: "x&y", color: "#000", values: vec![0, 10, 5] }]);
        assert!(html.contains("a&lt;b") && html.contains("x&amp;y") && html.contains("<polyline"), "{html}");
        assert!(html.contains(&format!("{LEFT},{HEIGHT} ")), "zero lies on the axis: {html}");
        assert!(!html.contains("script"), "{html}");
    }
}
