//! The kernel's state of a map's paths.

use super::map::Map;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::DevNo;
use crate::kernel::dm::{self, Target};
use crate::kernel::{Roots, worker};

/// The state of a map.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MapStatus {
    /// Whether I/O waits while there is no path (`queue_if_no_path`) instead of failing.
    /// The map's own flush then waits for ever too.
    pub queues: bool,
    /// The paths, in the kernel's order.
    pub paths: Vec<PathStatus>,
}

/// The state of one path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathStatus {
    /// The disk.
    pub devno: DevNo,
    /// Whether the path takes I/O. Otherwise it has failed, and waits until multipathd
    /// reinstates it.
    pub active: bool,
}

impl MapStatus {
    /// How many paths take I/O.
    #[must_use]
    pub fn active(&self) -> usize {
        self.paths.iter().filter(|path| path.active).count()
    }

    /// How many paths do not take I/O.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.paths.len() - self.active()
    }

    /// Parses the target's parameters and status (`drivers/md/dm-mpath.c`,
    /// `multipath_status`).
    fn parse(parameters: &str, status: &str) -> Option<Self> {
        let mut words = parameters.split_ascii_whitespace();
        let queues = counted(&mut words)?.contains(&"queue_if_no_path");

        // The format is FEATURES HANDLER groups next (A|D|E SELECTOR paths args (dev A|F
        // failures arg*)*)*, where capitals are counted lists.
        let mut words = status.split_ascii_whitespace();
        counted(&mut words)?;
        counted(&mut words)?;
        let groups: usize = number(&mut words)?;
        words.next()?;
        let mut paths = Vec::new();
        for _ in 0..groups {
            words.next()?;
            counted(&mut words)?;
            let count: usize = number(&mut words)?;
            let arguments: usize = number(&mut words)?;
            for _ in 0..count {
                let devno = words.next()?.parse().ok()?;
                let active = match words.next()? {
                    "A" => true,
                    "F" => false,
                    _ => return None,
                };
                words.next()?;
                take(&mut words, arguments)?;
                paths.push(PathStatus { devno, active });
            }
        }
        Some(Self { queues, paths })
    }
}

/// Takes `count` words; `None` if there are fewer. The text bounds the allocation.
fn take<'a>(words: &mut impl Iterator<Item = &'a str>, count: usize) -> Option<Vec<&'a str>> {
    let taken: Vec<_> = words.by_ref().take(count).collect();
    (taken.len() == count).then_some(taken)
}

/// Reads a number, and takes that many words.
fn counted<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<Vec<&'a str>> {
    let count = number(words)?;
    take(words, count)
}

fn number<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<usize> {
    words.next()?.parse().ok()
}

impl Map {
    /// Asks the kernel for the state of the map and of its paths. Needs `CAP_SYS_ADMIN`.
    ///
    /// # Errors
    /// `Vanished` if this instance of the map is over; `NotReady` if it has no table yet;
    /// `NotSupported`; `NotPermitted`; `TimedOut` at stage `map`.
    pub fn status(&self, roots: &Roots, deadline: Deadline) -> Result<MapStatus> {
        let (map, roots) = (self.clone(), roots.clone());
        worker::run(
            Stage::Map,
            &format!("the status of {self}"),
            deadline,
            || self.describe(),
            move || read_status(&roots, &map),
        )
    }
}

/// **May block**: call it on a worker.
pub(super) fn read_status(roots: &Roots, map: &Map) -> Result<MapStatus> {
    map.require()?;
    let table = the_target(map, dm::table(roots, map.uuid())?)?;
    let status = the_target(map, dm::table_status(roots, map.uuid())?)?;
    MapStatus::parse(&table.parameters, &status.parameters).ok_or_else(|| {
        let message = format!(
            "the kernel's status of {map} is of a form that is not known: {:?}",
            status.parameters
        );
        Error::new(ErrorKind::Protocol, message)
    })
}

/// Requires exactly one target, of kind `multipath`: every map has it
/// (`DM_TARGET_SINGLETON`, `DM_TARGET_IMMUTABLE`).
pub(super) fn the_target(map: &Map, targets: Vec<Target>) -> Result<Target> {
    match <[Target; 1]>::try_from(targets) {
        Ok([target]) if target.kind == "multipath" => Ok(target),
        _ => {
            let message = format!("{map} has no table of multipath: it is being made, or wiped");
            Err(Error::new(ErrorKind::NotReady, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Linux 6.1 printed this for two paths in two groups.
    const TABLE: &str = "0 1 alua 2 1 service-time 0 1 2 8:16 1 1 service-time 0 1 2 8:0 1 1 ";
    const STATUS: &str = "2 0 1 0 2 1 A 0 1 2 8:16 A 0 0 1 E 0 1 2 8:0 F 3 0 1 ";

    #[test]
    fn two_groups_of_one_path_each_are_read() {
        let status = MapStatus::parse(TABLE, STATUS).unwrap();
        assert!(!status.queues);
        assert_eq!((status.active(), status.failed()), (1, 1));
        let paths: Vec<_> = status
            .paths
            .iter()
            .map(|path| path.devno.to_string())
            .collect();
        assert_eq!(paths, ["8:16", "8:0"]);
        assert!(status.paths[0].active);
    }

    #[test]
    fn queueing_is_one_of_the_features_wherever_it_stands_and_nowhere_else() {
        for (table, queues) in [
            ("1 queue_if_no_path 0 1 1 round-robin 0 1 1 8:0 1 ", true),
            ("3 pg_init_retries 50 queue_if_no_path 0 0 0 ", true),
            ("0 0 0 0 queue_if_no_path", false),
        ] {
            let status = MapStatus::parse(table, "2 0 0 0 0 0 ").unwrap();
            assert_eq!(status.queues, queues, "{table}");
            assert_eq!(status.paths, []);
        }
    }

    #[test]
    fn a_selector_with_arguments_of_its_own_is_passed_over() {
        let status = "2 0 0 0 1 1 A 2 x y 2 0 8:0 A 0 8:16 F 1 ";
        let status = MapStatus::parse(TABLE, status).unwrap();
        assert_eq!((status.active(), status.failed()), (1, 1));
    }

    #[test]
    fn a_text_that_is_cut_short_or_counts_more_than_it_holds_is_refused() {
        let words: Vec<&str> = STATUS.split_whitespace().collect();
        for length in 0..words.len() {
            let cut = words[..length].join(" ");
            assert_eq!(MapStatus::parse(TABLE, &cut), None, "{cut:?}");
        }
        for status in [
            "18446744073709551615 x",
            "0 0 18446744073709551615 1 ",
            "0 0 1 1 A 0 18446744073709551615 18446744073709551615 8:0 A 0 ",
            "0 0 1 1 A 0 1 0 8:0 X 0 ",
            "0 0 1 1 A 0 1 0 sda A 0 ",
            "-1",
        ] {
            assert_eq!(MapStatus::parse(TABLE, status), None, "{status:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics(table: String, status: String) {
            let _ = MapStatus::parse(&table, &status);
        }

        #[test]
        fn what_the_kernel_prints_of_any_map_is_read_and_no_beginning_of_it_is(
            groups in proptest::collection::vec(
                proptest::collection::vec((0..300_u32, proptest::bool::ANY), 0..4), 0..4
            ),
            arguments in 0..3_usize,
        ) {
            let argument = " 7".repeat(arguments);
            let group = |paths: &Vec<(u32, bool)>| {
                let paths = paths.iter().map(|(minor, active)| {
                    let state = if *active { "A" } else { "F" };
                    format!(" 8:{minor} {state} 0{argument}")
                });
                let paths: Vec<String> = paths.collect();
                format!(" E 1 x {} {arguments}{}", paths.len(), paths.concat())
            };
            let text: Vec<String> = groups.iter().map(group).collect();
            let text = format!("2 0 1 0 {} 1{}", groups.len(), text.concat());
            let status = MapStatus::parse("0", &text).unwrap();
            let found = status.paths.iter().map(|path| (path.devno.minor, path.active));
            let expected: Vec<_> = groups.concat();
            proptest::prop_assert_eq!(found.collect::<Vec<_>>(), expected, "{}", &text);
            let words: Vec<&str> = text.split(' ').collect();
            for length in 0..words.len() {
                let cut = words[..length].join(" ");
                proptest::prop_assert_eq!(MapStatus::parse("0", &cut), None, "{}", cut);
            }
        }
    }
}
