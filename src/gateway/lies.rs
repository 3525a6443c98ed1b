//! What a compromised gateway tells its nodes: one list, a rate for each lie, and the fact that one was told. Who tells
//! them is [`super::session`], what is forged comes from [`super::forger`].
//!
//! Each lie is noted as an event of the gateway before it is told, and so is what the node answered: a run is judged by
//! both.

use std::str::FromStr;
use std::time::Duration;

use rand::Rng;

use crate::model::ServerTime;

/// Event: a lie was told, with `lie` and what it was about.
pub const TOLD: &str = "lie.told";
/// Event: what the node made of a command that was a lie: `lie`, `command`, `answer` (a reason token, or a state).
pub const ANSWERED: &str = "lie.answered";
/// What ids of forged commands begin with.
pub const FORGED: &str = "forged-";
/// A forged trust bundle has this version, above every true one.
pub const FORGED_VERSION: u64 = 1 << 40;

/// Always, in ‰.
const ALWAYS: u16 = 1000;

macro_rules! lies {
    ($($name:ident = $text:literal, $means:literal;)+) => {
        /// A lie.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Lie {
            $(#[doc = $means] $name,)+
        }

        impl Lie {
            /// Every one.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// Its name.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)+ }
            }
        }

        const COUNT: usize = [$($text,)+].len();
    };
}

lies! {
    ForgeUnsigned = "forge-unsigned", "At a heartbeat: a command that nobody has signed.";
    ForgeSigned = "forge-signed", "At a heartbeat: a command under a worker's certificate of the gateway's own making.";
    AlterBody = "alter-body", "At a heartbeat: a worker's signature under other bytes than it was made over.";
    SwapNodes = "swap-nodes", "At a heartbeat: another node's command, as it was signed.";
    ForgeCancel = "forge-cancel", "Behind a command: its cancellation, which no worker has signed; at a heartbeat that of a program that runs.";
    ForgeBundle = "forge-bundle", "At a heartbeat: a trust bundle with the gateway's own roots and endpoints.";
    ForgeRevocation = "forge-revocation", "At a heartbeat: a revocation of the node's certificate, under a key of the gateway's own.";
    ReplayEnded = "replay-ended", "At a heartbeat: the latest commands that the node has ended, once more.";
    Reorder = "reorder", "A command is overtaken by the next one.";
    Withhold = "withhold", "A command that soon expires is delivered when it has.";
    TimeBehind = "time-behind", "A Welcome names a time long past.";
    TimeAhead = "time-ahead", "A Welcome names a time after the end of the node's certificate.";
    TimePushed = "time-pushed", "A Welcome names a time ahead, within the node's certificate.";
    AckResult = "ack-result", "A result is acked and not stored.";
    AckEvents = "ack-events", "Events are acked and not stored.";
    AckAhead = "ack-ahead", "At a heartbeat: events are acked that the node has not sent.";
    RenewForged = "renew-forged", "A renewal is answered with the gateway's own trust bundle, under a key of its own.";
    RenewStale = "renew-stale", "A renewal is answered with the answer to an earlier one of the node.";
    RenewSwapped = "renew-swapped", "A renewal is answered with the answer to another node's.";
}

/// A number that no journal has come to.
pub const AHEAD: u64 = 1 << 40;

impl Lie {
    /// By its name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|lie| lie.name() == name)
    }

    /// Whether it puts bytes before the node that only a key which the gateway has not got could make true for it.
    pub fn forges(self) -> bool {
        match self {
            Self::ForgeUnsigned
            | Self::ForgeSigned
            | Self::AlterBody
            | Self::SwapNodes
            | Self::ForgeCancel
            | Self::ForgeBundle
            | Self::ForgeRevocation
            | Self::RenewForged
            | Self::RenewStale
            | Self::RenewSwapped => true,
            Self::ReplayEnded
            | Self::Reorder
            | Self::Withhold
            | Self::TimeBehind
            | Self::TimeAhead
            | Self::TimePushed
            | Self::AckResult
            | Self::AckEvents
            | Self::AckAhead => false,
        }
    }

    /// Whether it is about the time.
    pub fn is_of_time(self) -> bool {
        matches!(self, Self::TimeBehind | Self::TimeAhead | Self::TimePushed)
    }
}

/// A lie and how often it is told where it can be, ‰. As text `NAME`, which is always, or `NAME=PERMILLE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate(pub Lie, pub u16);

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, share) = text.split_once('=').unwrap_or((text, "1000"));
        let lie = Lie::from_name(name).ok_or_else(|| {
            let names: Vec<&str> = Lie::ALL.iter().map(|lie| lie.name()).collect();
            format!("there is no lie {name:?}; there are: {}", names.join(", "))
        })?;
        match share.parse() {
            Ok(permille) if permille <= ALWAYS => Ok(Self(lie, permille)),
            _ => Err(format!("{share:?} is no share in thousandths, 0 to {ALWAYS}")),
        }
    }
}

/// The lies of a gateway; by default none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Lies {
    /// Its Welcomes name a time this far ahead of its own.
    pub welcome_ahead: Duration,
    /// Its Welcomes name a time this far behind its own.
    pub welcome_behind: Duration,
    /// It hangs up after each Welcome.
    pub hangs_up: bool,
    /// How often each lie is told where it can be, ‰.
    rates: [u16; COUNT],
}

impl Lies {
    /// The same, and this one as often.
    #[must_use]
    pub fn and(mut self, Rate(lie, permille): Rate) -> Self {
        if let Some(rate) = self.rates.get_mut(lie as usize) {
            *rate = permille;
        }
        self
    }

    /// Those that are told, each with its rate.
    pub fn rates(&self) -> impl Iterator<Item = Rate> + '_ {
        Lie::ALL.iter().zip(self.rates).filter(|(_, rate)| *rate > 0).map(|(lie, rate)| Rate(*lie, rate))
    }

    /// Whether it lies at all.
    pub fn any(&self) -> bool {
        self.rates().next().is_some()
    }

    /// Whether this one is told now. Chance is asked for lies that are told alone, so that an honest gateway's is the same
    /// whatever there is to tell.
    pub fn draw(&self, lie: Lie, rng: &mut impl Rng) -> bool {
        let rate = self.rates.get(lie as usize).copied().unwrap_or(0);
        rate > 0 && rng.random_range(0..ALWAYS) < rate
    }

    /// The time that a Welcome names when it is `now`, and the lie that it is, for a certificate that holds until
    /// `not_after`.
    pub fn welcome_time(
        &self,
        now: ServerTime,
        not_after: ServerTime,
        rng: &mut impl Rng,
    ) -> (ServerTime, Option<Lie>) {
        let between = |rng: &mut dyn rand::RngCore, from: Duration, to: Duration| {
            Duration::from_secs(rng.random_range(from.as_secs()..=to.as_secs().max(from.as_secs())))
        };
        let told = Lie::ALL.iter().copied().filter(|lie| lie.is_of_time()).find(|lie| self.draw(*lie, rng));
        let time = match told {
            Some(Lie::TimeBehind) => now.minus(between(rng, LONG, DAY)),
            Some(Lie::TimeAhead) => not_after.plus(between(rng, Duration::ZERO, DAY)),
            Some(_) if rng.random_range(0..FAR) > 0 => now.plus(between(rng, Duration::ZERO, LITTLE)),
            Some(_) => now.plus(between(rng, LONG, not_after.since(now) * 3 / 4)),
            None => now,
        };
        (time.plus(self.welcome_ahead).minus(self.welcome_behind), told)
    }
}

/// A time that lies so far back is refused by every node.
const LONG: Duration = Duration::from_secs(600);
const DAY: Duration = Duration::from_secs(24 * 3600);
/// A push that costs a node little, and one of how many is a great one: that one keeps it from honest gateways until it has
/// asked the join service, which it does once in ten minutes.
const LITTLE: Duration = Duration::from_secs(20);
const FAR: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng as _;
    use rand::rngs::StdRng;

    #[test]
    fn a_rate_is_a_name_and_thousandths_and_nothing_else() {
        assert_eq!("withhold=25".parse(), Ok(Rate(Lie::Withhold, 25)));
        assert_eq!("reorder".parse(), Ok(Rate(Lie::Reorder, 1000)));
        for bad in ["withhold=1001", "withhold=", "withhold=-1", "truth", ""] {
            assert!(bad.parse::<Rate>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_lie_is_told_as_often_as_its_rate_says_and_no_other_is() {
        let rng = &mut StdRng::seed_from_u64(1);
        let lies = Lies::default().and(Rate(Lie::Reorder, 100));
        let told = (0..10_000).filter(|_| lies.draw(Lie::Reorder, rng)).count();
        assert!((800..1200).contains(&told), "{told}");
        assert!(!(0..1000).any(|_| lies.draw(Lie::Withhold, rng)));
        assert_eq!(lies.rates().collect::<Vec<_>>(), [Rate(Lie::Reorder, 100)]);
    }

    #[test]
    fn each_lie_about_the_time_lies_where_its_name_says() {
        let rng = &mut StdRng::seed_from_u64(1);
        let (now, not_after) = (ServerTime(1_000_000_000), ServerTime(1_040_000_000));
        for _ in 0..200 {
            let time = |lie, rng: &mut StdRng| {
                let (time, told) = Lies::default().and(Rate(lie, 1000)).welcome_time(now, not_after, rng);
                assert_eq!(told, Some(lie));
                time
            };
            assert!(time(Lie::TimeBehind, rng) <= now.minus(LONG));
            assert!(time(Lie::TimeAhead, rng) >= not_after);
            assert!((now..not_after).contains(&time(Lie::TimePushed, rng)));
        }
        assert_eq!(Lies::default().welcome_time(now, not_after, rng), (now, None));
    }
}
