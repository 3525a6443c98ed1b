//! A figure: the rounds of a thing and of its floor, their ratio, and the aim that it is held against.

use std::fmt::{self, Write as _};

use serde_json::{Value, json};

/// What a figure should be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Aim {
    /// The ratio is at most this.
    AtMost(f64),
    /// The ratio is at least this.
    AtLeast(f64),
    /// The ratio is this: a count, without any margin.
    Exactly(f64),
    /// The measured value itself, in its unit, is below this; the floor is for comparison.
    Below(f64),
    /// The measured value itself, in its unit, is at least this; the floor is for comparison.
    Above(f64),
    /// There is none: shown for whoever compares releases.
    Shown,
}

impl Aim {
    /// Whether it is met where `margin` times the aim is still taken; counts have no margin.
    fn met(self, ratio: f64, value: f64, margin: f64) -> bool {
        // Counts below 2^53 are exact, and so is their quotient when they are equal.
        match self {
            Self::AtMost(most) => ratio <= most * margin,
            Self::AtLeast(least) => ratio * margin >= least,
            Self::Exactly(wanted) => (ratio - wanted).abs() < f64::EPSILON,
            Self::Below(most) => value < most * margin,
            Self::Above(least) => value * margin >= least,
            Self::Shown => !ratio.is_nan(),
        }
    }

    fn json(self) -> Value {
        match self {
            Self::AtMost(most) => json!({ "ratio_at_most": most }),
            Self::AtLeast(least) => json!({ "ratio_at_least": least }),
            Self::Exactly(wanted) => json!({ "ratio_exactly": wanted }),
            Self::Below(most) => json!({ "value_below": most }),
            Self::Above(least) => json!({ "value_at_least": least }),
            Self::Shown => Value::Null,
        }
    }
}

impl fmt::Display for Aim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(most) => write!(f, "at most {most}"),
            Self::AtLeast(least) => write!(f, "at least {least}"),
            Self::Exactly(wanted) => write!(f, "exactly {wanted}"),
            Self::Below(most) => write!(f, "value below {most}"),
            Self::Above(least) => write!(f, "value at least {least}"),
            Self::Shown => f.write_str("none"),
        }
    }
}

/// The middle and the ends of some rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    /// Of at least one round; of none it is not a number, which meets no aim.
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or(f64::NAN);
        let last = values.len().saturating_sub(1);
        Self { median: f64::midpoint(at(last / 2), at(last.div_ceil(2))), min: at(0), max: at(last) }
    }

    fn json(self) -> Value {
        json!({ "median": self.median, "min": self.min, "max": self.max })
    }
}

/// One of the two things of a figure.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    what: String,
    unit: &'static str,
    rounds: Vec<f64>,
}

impl Part {
    /// A thing with one value a round.
    pub fn new(what: impl Into<String>, unit: &'static str, rounds: Vec<f64>) -> Self {
        Self { what: what.into(), unit, rounds }
    }

    fn spread(&self) -> Spread {
        Spread::of(self.rounds.clone())
    }

    fn json(&self) -> Value {
        let mut value = self.spread().json();
        if let Some(fields) = value.as_object_mut() {
            fields.insert("what".into(), self.what.clone().into());
            fields.insert("unit".into(), self.unit.into());
        }
        value
    }

    fn text(&self) -> String {
        format!("{} {}", short(self.spread().median), self.unit).trim_end().to_owned()
    }
}

/// A thing against its floor.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    name: &'static str,
    ours: Part,
    floor: Part,
    aim: Aim,
    /// Whether a check passes over it.
    without_margin: bool,
}

impl Figure {
    /// Two parts of as many rounds each, and what their ratio should be.
    pub fn new(name: &'static str, ours: Part, floor: Part, aim: Aim) -> Self {
        Self { name, ours, floor, aim, without_margin: false }
    }

    /// Its distance from the aim is less than what the machine adds to it: it is shown, and no check fails by it.
    #[must_use]
    pub fn without_margin(self) -> Self {
        Self { without_margin: true, ..self }
    }

    fn ratio(&self) -> Spread {
        let rounds = self.ours.rounds.iter().zip(&self.floor.rounds);
        Spread::of(rounds.map(|(ours, floor)| ours / floor).collect())
    }

    /// Whether the aim is met; `margin` above 1 takes so much more.
    pub fn met(&self, margin: f64) -> bool {
        self.aim.met(self.ratio().median, self.ours.spread().median, margin)
    }

    /// Whether a check that takes `margin` times the aim lets it pass.
    pub fn passes(&self, margin: f64) -> bool {
        self.without_margin || self.met(margin)
    }

    fn json(&self) -> Value {
        json!({
            "name": self.name,
            "checked": !self.without_margin,
            "ratio": self.ratio().json(),
            "aim": self.aim.json(),
            "met": self.met(1.0),
            "ours": self.ours.json(),
            "floor": self.floor.json(),
        })
    }
}

/// Three digits that count.
fn short(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

/// The figures for people: ratio, range, aim and verdict, and the parts below.
pub fn table(figures: &[Figure], margin: f64) -> String {
    let mut text = String::new();
    let width = figures.iter().map(|figure| figure.name.len()).max().unwrap_or(0);
    for figure in figures {
        let ratio = figure.ratio();
        let range = format!("({}-{})", short(ratio.min), short(ratio.max));
        let verdict = match (figure.aim, figure.met(1.0), figure.met(margin)) {
            (Aim::Shown, true, _) => String::new(),
            (aim, true, _) => format!("aim {aim}: met"),
            (aim, false, true) => format!("aim {aim}: missed, within the margin"),
            (aim, false, false) if figure.without_margin => format!("aim {aim}: missed (no check holds it)"),
            (aim, false, false) => format!("aim {aim}: missed"),
        };
        let line = format!("{:width$}  {:>5} {range:<13}  {verdict}", figure.name, short(ratio.median));
        let _ = writeln!(text, "{}", line.trim_end());
        let (ours, floor) = (&figure.ours, &figure.floor);
        let _ = writeln!(
            text,
            "{:width$}  {}, {}, against {}, {}",
            "",
            ours.text(),
            ours.what,
            floor.text(),
            floor.what
        );
    }
    text
}

/// The figures as one JSON object.
pub fn json(bench: &str, figures: &[Figure]) -> Value {
    let rounds = figures.iter().map(|figure| figure.ours.rounds.len()).max().unwrap_or(0);
    json!({
        "schema": 1,
        "bench": bench,
        "rounds": rounds,
        "figures": figures.iter().map(Figure::json).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(ours: &[f64], floor: &[f64], aim: Aim) -> Figure {
        Figure::new("x", Part::new("ours", "us", ours.into()), Part::new("floor", "us", floor.into()), aim)
    }

    #[test]
    fn the_ratio_is_the_median_of_the_rounds_ratios_and_not_the_ratio_of_medians() {
        let figure = figure(&[10.0, 200.0, 30.0], &[10.0, 100.0, 10.0], Aim::AtMost(2.0));
        assert_eq!(figure.ratio(), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert!(figure.met(1.0));
    }

    #[test]
    fn a_margin_is_for_ratios_and_never_for_counts() {
        assert!(!figure(&[1.4], &[1.0], Aim::AtMost(1.3)).met(1.0));
        assert!(figure(&[1.4], &[1.0], Aim::AtMost(1.3)).met(1.15));
        assert!(!figure(&[1.5], &[1.0], Aim::AtMost(1.3)).met(1.15));
        assert!(figure(&[0.53], &[1.0], Aim::AtLeast(0.6)).met(1.15));
        assert!(!figure(&[0.52], &[1.0], Aim::AtLeast(0.6)).met(1.15));
        assert!(figure(&[64.0], &[64.0], Aim::Exactly(1.0)).met(1.0));
        assert!(!figure(&[65.0], &[64.0], Aim::Exactly(1.0)).met(1.15));
    }

    #[test]
    fn no_rounds_meet_no_aim() {
        for aim in [Aim::AtMost(9.0), Aim::AtLeast(0.1), Aim::Exactly(1.0), Aim::Below(9.0), Aim::Above(0.1)]
        {
            assert!(!figure(&[], &[], aim).met(1.15), "{aim}");
        }
    }

    #[test]
    fn a_figure_without_a_margin_is_shown_as_missed_and_fails_no_check() {
        let missed = figure(&[3.0], &[1.0], Aim::AtMost(1.3));
        assert!(!missed.passes(1.15));
        let shown = missed.without_margin();
        assert!(shown.passes(1.15) && !shown.met(1.0));
        assert!(table(&[shown], 1.15).contains("missed (no check holds it)"));
    }

    #[test]
    fn a_missed_aim_is_said_and_the_parts_are_shown() {
        let text = table(&[figure(&[14.0], &[10.0], Aim::AtMost(1.3))], 1.0);
        assert!(text.contains("1.40") && text.contains("aim at most 1.3: missed\n"), "{text}");
        assert!(text.contains("14.0 us, ours, against 10.0 us, floor"), "{text}");
        let value = json("journal", &[figure(&[14.0], &[10.0], Aim::AtMost(1.3))]);
        assert_eq!(value["figures"][0]["met"], false);
        assert_eq!(value["figures"][0]["ours"]["median"], 14.0);
    }
}
