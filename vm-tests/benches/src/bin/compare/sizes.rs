//! One LUN of targets of several sizes, by lunbd and by what is used today.

use std::time::{Duration, Instant};

use lunbd::Engine;
use vm_bench::figures::{Among, Busy, Row, Scsi, Size};
use vm_tests::guest::agent::engine;
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsid::{Iscsid, Session, Timeouts};
use vm_tests::guest::lio::Store;

use crate::rounds::{AttachMethod, Rounds, millis};
use crate::scsi_methods::{ByHand, InProcess, WholeTarget};
use crate::table;
use crate::udev_load::{self, UdevLoad};

const SIZES: [u32; 4] = [16, 64, 256, 1024];
/// The LUN that is attached: each target has it, and it is not the first.
const LUN: u64 = 9;
/// The size of a LUN. Nobody reads its data.
const BYTES: u64 = 64 << 10;
/// The sizes and the rounds of the ways that scan a whole target. They bring all its LUNs,
/// which takes seconds to minutes under emulation.
const WHOLE_TARGET: [(u32, usize); 4] = [(16, 3), (64, 1), (256, 1), (1024, 1)];
/// The size of the target whose other LUNs are all attached in the end, and its rounds.
const AMONG: (u32, usize) = (256, 10);
/// The size of the target of the rounds under changes of other devices, and its most rounds.
const BUSY: (u32, usize) = (256, 10);

pub(crate) fn measure(rounds: usize) -> Scsi {
    let begun = Instant::now();
    let targets: Vec<Target> = SIZES.iter().map(|luns| Target::new(*luns)).collect();
    let made = begun.elapsed();
    let iscsid = Iscsid::start();
    let logged_in = targets.iter().map(|target| target.login(&iscsid));
    let sessions: Vec<Session> = logged_in.collect();
    println!(
        "iSCSI targets with {SIZES:?} LUNs, made in {:.1} s, logged into in {:.1} s; of each, \
         LUN {LUN} is wanted.\n",
        made.as_secs_f64(),
        begun.elapsed().saturating_sub(made).as_secs_f64()
    );
    let engine = engine();
    let of = |luns: u32| {
        let at = SIZES.iter().position(|size| *size == luns);
        &sessions[at.expect("one of the sizes")]
    };

    let mut sizes = one_lun(&engine, &sessions, rounds);
    for size in &mut sizes {
        let whole = WHOLE_TARGET.iter().find(|(luns, _)| *luns == size.luns);
        if let Some((_, rounds)) = whole {
            size.rows.extend(whole_target(of(size.luns), *rounds));
        }
        let title = format!("SCSI, one LUN of {}", size.luns);
        table::print(&title, &size.rows);
    }

    let load = UdevLoad::new();
    let busy = Busy {
        luns: BUSY.0,
        rate: udev_load::RATE,
        each_ms: whole_millis(udev_load::EACH),
        lasting_ms: whole_millis(udev_load::LASTING),
        busy_part: load.busy_part(),
        rows: both(
            &engine,
            of(BUSY.0),
            Rounds::of(rounds.min(BUSY.1)).under(&load),
        ),
    };
    let title = format!("SCSI, {} slow changes/s of others", busy.rate);
    table::print(&title, &busy.rows);
    println!(
        "  udev's queue busy {:.0} % of that time\n",
        busy.busy_part * 100.0
    );

    let among = among(&engine, of(AMONG.0));
    let title = format!("SCSI, {} LUNs attached already", among.present);
    table::print(&title, &among.rows);
    Scsi {
        lun: LUN,
        sizes,
        among,
        busy,
    }
}

fn whole_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// All sizes take turns, so that a change of the machine meanwhile affects all of them.
fn one_lun(engine: &Engine, sessions: &[Session], rounds: usize) -> Vec<Size> {
    let mut ways: Vec<(InProcess<'_>, ByHand<'_>)> = sessions
        .iter()
        .map(|session| {
            (
                InProcess::new(engine, session, LUN),
                ByHand::new(session, LUN),
            )
        })
        .collect();
    let mut turns: Vec<&mut dyn AttachMethod> = Vec::new();
    for (lunbd, hand) in &mut ways {
        turns.push(lunbd);
        turns.push(hand);
    }
    let mut rows = Rounds::of(rounds).take(&mut turns).into_iter();
    let of_one = |luns: &u32| Size {
        luns: *luns,
        rows: rows.by_ref().take(2).collect(),
    };
    SIZES.iter().map(of_one).collect()
}

fn whole_target(session: &Session, rounds: usize) -> Vec<Row> {
    Rounds::few(rounds).take(&mut [
        &mut WholeTarget::wildcard(session, LUN),
        &mut WholeTarget::script(session, LUN),
        &mut WholeTarget::iscsiadm(session, LUN),
    ])
}

fn both(engine: &Engine, session: &Session, rounds: Rounds<'_>) -> Vec<Row> {
    rounds.take(&mut [
        &mut InProcess::new(engine, session, LUN),
        &mut ByHand::new(session, LUN),
    ])
}

/// Scans a whole target, and attaches and detaches one LUN among the others, which stay.
fn among(engine: &Engine, session: &Session) -> Among {
    let (luns, rounds) = AMONG;
    let begun = Instant::now();
    WholeTarget::wildcard(session, LUN).attach();
    println!(
        "{luns} LUNs by a wildcard scan: {:.0} ms\n",
        millis(begun.elapsed())
    );
    ByHand::new(session, LUN).detach();
    Among {
        present: luns - 1,
        rows: both(engine, session, Rounds::of(rounds)),
    }
}

/// A target whose LUNs each have their own identity.
struct Target(IscsiTarget);

impl Target {
    fn new(luns: u32) -> Self {
        let mut target = IscsiTarget::new(&format!("iqn.2026-01.example:luns-{luns}"));
        for lun in 0..luns {
            // The identity is made of its first digits.
            let serial = format!("{lun:08x}{luns:08x}");
            target.map(u64::from(lun), &Store::ramdisk(&serial, BYTES));
        }
        Self(target)
    }

    /// Logs in for as long as the bench takes, without pings that a busy guest could miss.
    fn login(&self, iscsid: &Iscsid) -> Session {
        let patient = Timeouts {
            replacement: 120,
            noop_interval: 0,
            noop_timeout: 0,
        };
        iscsid.login(PORTALS[0], self.0.iqn(), patient)
    }
}
