//! Which points of a sweep one run takes: mostly a fifth, and another fifth with each seed.
//!
//! Runs with consecutive seeds take all parts in turn, so any five of them take every point of
//! most sweeps. Some points take more runs:
//!
//! - an act in each of the ways in which it can fail or hang: 25 (`fault_table`);
//! - a reset at each step with each kind of volume: 15 (`own_boot_reset_mpath_nbd`);
//! - a point that only one of the two kernels has: twice as many, since the seed also chooses
//!   the kernel.
//!
//! A step that does not come again in its run, such as a question to udev, is not met. The
//! summary counts those.
//!
//! A point's part follows from its name and not from its place in a list: kernels differ in what
//! a list holds, and one more point must not move the others. Five is odd, so a lab that
//! chooses a test's kernel by the seed's parity takes each point on both kernels within twice as
//! many runs.

use std::fmt;

/// A sweep has this many parts.
pub const PARTS: u64 = 5;

/// The part of a sweep that a run takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The seed modulo the square of [`PARTS`]; `None` takes every point.
    seed: Option<u64>,
}

impl Part {
    /// The part of this run.
    #[must_use]
    pub fn of_this_run() -> Self {
        if super::sweeps_are_whole() {
            return Self { seed: None };
        }
        Self::of_seed(super::seed())
    }

    /// The part of a run with this seed.
    #[must_use]
    pub fn of_seed(seed: u64) -> Self {
        Self {
            seed: Some(seed % (PARTS * PARTS)),
        }
    }

    /// Whether this part has the point. `journal.synced:2` is in the part after that of
    /// `journal.synced:1`.
    #[must_use]
    pub fn has(self, point: &str) -> bool {
        self.seed
            .is_none_or(|seed| place(point) % PARTS == seed % PARTS)
    }

    /// Whether this run takes this one of a point's five variants. A part that has the point
    /// takes one variant, and any 25 consecutive seeds take each variant once.
    #[must_use]
    pub fn has_variant(self, point: &str, variant: u64) -> bool {
        // All points of a part have the same remainder of their place.
        let own = place(point) / PARTS;
        let is_turn = |seed| (own + seed / PARTS) % PARTS == variant % PARTS;
        self.has(point) && self.seed.is_none_or(is_turn)
    }

    /// The points of a short list that are in this part: each fifth, so that no part is much
    /// smaller than another. The list must be the same on each kernel.
    #[must_use]
    pub fn each_fifth<T>(self, points: Vec<T>) -> Vec<T> {
        let numbered = (0..).zip(points);
        let taken =
            numbered.filter(|(at, _)| self.seed.is_none_or(|seed| at % PARTS == seed % PARTS));
        taken.map(|(_, point)| point).collect()
    }
}

impl fmt::Display for Part {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.seed {
            Some(seed) => write!(formatter, "part {} of {PARTS}", seed % PARTS + 1),
            None => formatter.write_str("all parts"),
        }
    }
}

/// A number that follows from the point's name (FNV-1a), plus the number after its last colon.
fn place(point: &str) -> u64 {
    let parts = point.rsplit_once(':');
    let numbered = parts.and_then(|(name, count)| Some((name, count.parse().ok()?)));
    let (name, count): (&str, u64) = numbered.unwrap_or((point, 0));
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    (hash >> 32) + count
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const POINTS: [&str; 6] = [
        "attach journal.synced:1",
        "attach journal.synced:2",
        "detach journal.synced:1",
        "attach nbd.connected:1",
        "detach write delete:1",
        "no number",
    ];

    #[test]
    fn any_five_consecutive_seeds_take_each_point_once() {
        for first in [0, 1, 7, u64::MAX - 9, 1_795_418_939] {
            for point in POINTS {
                let seeds = first..first + PARTS;
                let times = seeds.filter(|&seed| Part::of_seed(seed).has(point));
                assert_eq!(times.count(), 1, "{point} from seed {first}");
            }
        }
    }

    #[test]
    fn five_parts_of_a_short_list_have_each_point_once_and_are_of_one_size() {
        let parts = (3..3 + PARTS).map(|seed| Part::of_seed(seed).each_fifth((0..11).collect()));
        let parts: Vec<Vec<u64>> = parts.collect();
        assert!(parts.iter().all(|part| (2..=3).contains(&part.len())));
        let points: BTreeSet<u64> = parts.concat().into_iter().collect();
        assert_eq!((points.len(), parts.concat().len()), (11, 11));
    }

    #[test]
    fn any_25_consecutive_seeds_take_each_variant_once() {
        for point in POINTS {
            for variant in 0..PARTS {
                let takes = |seed: &u64| Part::of_seed(*seed).has_variant(point, variant);
                let seeds: Vec<u64> = (31..56).filter(takes).collect();
                assert_eq!(seeds.len(), 1, "{point} {variant}");
                assert!(Part::of_seed(seeds[0]).has(point));
            }
        }
    }

    #[test]
    fn five_passes_of_a_point_are_in_five_parts_and_a_part_takes_one_variant_of_each() {
        let passes = (1..=PARTS).map(|pass| format!("attach ioctl SG_IO:{pass}"));
        let part_of = |point: &str| (0..PARTS).find(|&seed| Part::of_seed(seed).has(point));
        let parts: BTreeSet<_> = passes.map(|act| part_of(&act)).collect();
        assert_eq!(parts.len(), 5);
        for seed in 0..PARTS * PARTS {
            let part = Part::of_seed(seed);
            let variants = (0..PARTS).filter(|&variant| part.has_variant("fsync:1", variant));
            assert_eq!(variants.count(), usize::from(part.has("fsync:1")));
        }
    }

    #[test]
    fn a_kernel_that_is_chosen_by_the_seeds_parity_is_met_with_each_point_in_ten_runs() {
        for point in POINTS {
            let taken = (0..10).filter(|&seed| Part::of_seed(seed).has(point));
            let kernels: BTreeSet<u64> = taken.map(|seed| seed % 2).collect();
            assert_eq!(kernels.len(), 2, "{point}");
        }
    }

    #[test]
    fn a_point_that_another_kernel_lacks_does_not_move_the_others() {
        let part = Part::of_seed(3);
        let of = |points: &[&'static str]| -> BTreeSet<&str> {
            points
                .iter()
                .copied()
                .filter(|point| part.has(point))
                .collect()
        };
        let all = of(&POINTS);
        let mut fewer = of(&POINTS[1..]);
        if part.has(POINTS[0]) {
            fewer.insert(POINTS[0]);
        }
        assert_eq!(all, fewer);
    }
}
