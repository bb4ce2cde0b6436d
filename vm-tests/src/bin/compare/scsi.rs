//! One LUN of many, attached by the engine and by hand.

use std::fs;

use lunbd::Engine;
use lunbd::engine::Phase;
use vm_tests::guest::agent::{self, engine};
use vm_tests::guest::{ScsiDebug, udevd};

use crate::rounds::{self, Row, Way};

const LUNS: u32 = 256;
const LUN: u64 = 77;

pub(crate) fn compare() -> Vec<Row> {
    let target = ScsiDebug::with_luns(LUNS);
    rounds::take(&mut [
        &mut InProcess {
            engine: engine(),
            target: &target,
        },
        &mut ByHand { target: &target },
    ])
}

struct InProcess<'a> {
    engine: Engine,
    target: &'a ScsiDebug,
}

impl Way for InProcess<'_> {
    fn name(&self) -> &'static str {
        "lunbd, in the process"
    }

    fn attach(&mut self) -> Vec<Phase> {
        agent::attach(&self.engine, self.target, LUN).phases
    }

    fn disk(&self) -> Option<String> {
        self.target.disk(LUN)
    }

    fn detach(&mut self) -> Vec<Phase> {
        let detachment = agent::detach(&self.engine, self.target, LUN);
        detachment.expect("a detach").phases
    }

    fn is_gone(&self) -> bool {
        self.target.devices().is_empty()
    }
}

/// Without the INQUIRY, the claim and the flush that the engine adds.
struct ByHand<'a> {
    target: &'a ScsiDebug,
}

impl Way for ByHand<'_> {
    fn name(&self) -> &'static str {
        "echo > scan or delete; udevadm settle"
    }

    fn attach(&mut self) -> Vec<Phase> {
        self.target.scan(&format!("0 0 {LUN}"));
        udevd::settle();
        Vec::new()
    }

    fn disk(&self) -> Option<String> {
        self.target.disk(LUN)
    }

    fn detach(&mut self) -> Vec<Phase> {
        let delete = self.target.device_dir(LUN).join("delete");
        fs::write(&delete, "1").expect("a delete");
        udevd::settle();
        Vec::new()
    }

    fn is_gone(&self) -> bool {
        self.target.devices().is_empty()
    }
}
