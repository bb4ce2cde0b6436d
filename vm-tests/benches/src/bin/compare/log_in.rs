//! A login, the attach and detach of one LUN, and the logout.

use std::time::Duration;

use lunbd::engine::{Multipath, Phase};
use lunbd::iscsi::SessionOptions;
use lunbd::{AttachRequest, Engine, Source};
use vm_bench::figures::{Far, LogIn};
use vm_tests::guest::agent::{engine, soon};
use vm_tests::guest::iscsi_target::{IscsiTarget, PORTALS};
use vm_tests::guest::iscsid::{INITIATOR, Iscsid, Session, Timeouts, sessions};
use vm_tests::guest::lio::Store;
use vm_tests::guest::loopback::ImpairedLoopback;
use vm_tests::guest::{self, udevd};

use crate::rounds::{AttachMethod, Rounds};
use crate::table;

const IQN: &str = "iqn.2026-01.example:from-nothing";
const LUN: u64 = 9;
const BYTES: u64 = 1 << 20;
/// The number of portals of the logins in parallel.
const MANY: usize = 8;
/// The round trip of the network in the second half. A network without delay measures only the
/// work of the machine's processors.
const ROUND_TRIP: Duration = Duration::from_millis(20);

/// Runs open-iscsi's daemon throughout: its own way needs it, and it does not disturb the
/// other ways.
pub(crate) fn measure(rounds: usize) -> LogIn {
    let mut target = IscsiTarget::new(IQN);
    target.map(LUN, &Store::ramdisk("1091", BYTES));
    let mut portals = vec![PORTALS[0].to_owned()];
    for last in 1..MANY {
        let portal = format!("127.0.1.{last}:3260");
        target.listen(&portal);
        portals.push(portal);
    }
    let iscsid = Iscsid::start();
    let engine = engine();
    let take = |rounds: Rounds<'_>, title: &str| {
        let mut rows = rounds.take(&mut [
            &mut InProcess::new(&engine, "lunbd, in the process", &portals[..1]),
            &mut OpenIscsi::with_a_record(&iscsid, &portals[0]),
            &mut OpenIscsi::without(&portals[1]),
            &mut InProcess::new(&engine, "lunbd, 8 portals", &portals),
        ]);
        let many = rows.pop().expect("the last of them");
        table::print(&format!("iSCSI, login and one LUN{title}"), &rows);
        let ratio = many.attach.median / rows[0].attach.median;
        println!("  by {MANY} portals: {ratio:.2} x the time of one\n");
        table::print("iSCSI, by 8 portals", std::slice::from_ref(&many));
        (rows, many)
    };
    let (rows, many) = take(Rounds::of(rounds), "");
    let far = {
        let _slow = ImpairedLoopback::slow(ROUND_TRIP / 2);
        let (rows, many) = take(Rounds::of(rounds), ", far away");
        let round_trip = u64::try_from(ROUND_TRIP.as_millis()).expect("milliseconds");
        Far {
            round_trip,
            rows,
            many,
        }
    };
    LogIn {
        rows,
        portals: MANY,
        many,
        far: Some(far),
    }
}

struct InProcess<'a> {
    engine: &'a Engine,
    name: &'static str,
    source: Source,
    paths: usize,
    disk: Option<String>,
}

impl<'a> InProcess<'a> {
    fn new(engine: &'a Engine, name: &'static str, portals: &[String]) -> Self {
        let uri = format!("iscsi://{}/{IQN}/{LUN}", portals.join(","));
        Self {
            engine,
            name,
            source: uri.parse().expect("a source"),
            paths: portals.len(),
            disk: None,
        }
    }
}

impl AttachMethod for InProcess<'_> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn attach(&mut self) -> Vec<Phase> {
        let initiator = INITIATOR.parse().expect("a name");
        let request = AttachRequest::new(self.source.clone())
            .min_paths(self.paths)
            .multipath(Multipath::Off)
            .log_in(SessionOptions::new(initiator));
        let attachment = self.engine.attach(&request, soon()).expect("an attach");
        self.disk = attachment
            .node
            .file_name()
            .and_then(|name| name.to_str())
            .map(str::to_owned);
        attachment.phases
    }

    fn disk(&self) -> Option<String> {
        self.disk.clone()
    }

    fn detach(&mut self) -> Vec<Phase> {
        let detachment = self.engine.detach(self.source.clone(), soon());
        let detachment = detachment.expect("a detach");
        assert_eq!(detachment.logged_out.len(), self.paths, "{detachment:?}");
        detachment.phases
    }

    fn is_gone(&self) -> bool {
        sessions().is_empty()
    }
}

/// open-iscsi's commands, as today's drivers run them.
struct OpenIscsi<'a> {
    portal: &'a str,
    /// Whether the node record exists before the attach; else the attach makes it, and the
    /// detach deletes it.
    has_record: bool,
    session: Option<Session>,
}

impl<'a> OpenIscsi<'a> {
    /// Logs in once to make the record that the rounds use.
    fn with_a_record(iscsid: &Iscsid, portal: &'a str) -> Self {
        let patient = Timeouts {
            replacement: 120,
            noop_interval: 0,
            noop_timeout: 0,
        };
        iscsid.login(portal, IQN, patient).logout();
        Self {
            portal,
            has_record: true,
            session: None,
        }
    }

    fn without(portal: &'a str) -> Self {
        Self {
            portal,
            has_record: false,
            session: None,
        }
    }

    fn node(&self, operation: &[&str]) {
        let node = ["iscsiadm", "-m", "node", "-T", IQN, "-p", self.portal];
        guest::run(&[&node[..], operation].concat());
    }
}

impl AttachMethod for OpenIscsi<'_> {
    fn name(&self) -> &'static str {
        if self.has_record {
            "iscsiadm --login; echo C T L > scan; udevadm settle"
        } else {
            "the same, and iscsiadm -o new, update, delete"
        }
    }

    fn attach(&mut self) -> Vec<Phase> {
        if !self.has_record {
            self.node(&["-o", "new"]);
            self.node(&["-o", "update", "-n", "node.session.scan", "-v", "manual"]);
        }
        self.node(&["--login"]);
        let session = sessions().pop().expect("a session");
        session.scan(LUN);
        udevd::settle();
        self.session = Some(session);
        Vec::new()
    }

    fn disk(&self) -> Option<String> {
        self.session.as_ref()?.disk(LUN)
    }

    fn detach(&mut self) -> Vec<Phase> {
        let session = self.session.take().expect("an attach before");
        let delete = session.device_dir(LUN).join("delete");
        std::fs::write(&delete, "1").expect("the delete attribute");
        udevd::settle();
        self.node(&["--logout"]);
        if !self.has_record {
            self.node(&["-o", "delete"]);
        }
        Vec::new()
    }

    fn is_gone(&self) -> bool {
        sessions().is_empty()
    }
}
