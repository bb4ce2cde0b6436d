//! A program some of whose calls to the kernel fail, or never return, without a
//! line of it being changed: it is traced, and the call is taken away from it
//! where it enters the kernel.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde_json::Value;

/// What a call does instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It fails, and the kernel has done nothing.
    Fails(Errno),
    /// It does not return while the process lives. A message to multipathd, which
    /// is sent without waiting, is lost on its way instead: no answer comes.
    Hangs,
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fails(errno) => write!(formatter, "{errno:?}"),
            Self::Hangs => formatter.write_str("hangs"),
        }
    }
}

/// How a traced run ended.
#[derive(Debug)]
pub struct Traced {
    /// The acts on the kernel, in their order, each with its count:
    /// `write delete:1`.
    pub acts: Vec<String>,
    /// The fault was injected.
    pub injected: bool,
    /// What it left with.
    pub code: Option<i32>,
    /// What it printed, as JSON: the outcome, or the error.
    pub said: Value,
    /// How long it took.
    pub took: Duration,
}

impl Traced {
    /// The stage of its error.
    #[must_use]
    pub fn stage(&self) -> Option<&str> {
        self.said["stage"].as_str()
    }
}

/// Runs `lunbd --json` with these arguments; the act that is named has the
/// fault.
#[must_use]
pub fn run(arguments: &[String], inject: Option<(&str, Fault)>) -> Traced {
    run_until(arguments, inject, || false)
}

/// The same with one that goes on until it is ended (SIGTERM), when `is_over`.
#[must_use]
pub fn run_until(
    arguments: &[String],
    inject: Option<(&str, Fault)>,
    mut is_over: impl FnMut() -> bool + Send,
) -> Traced {
    super::enter();
    let begun = Instant::now();
    // It waits until it is traced, so that no call of it is missed.
    let mut command = Command::new("sh");
    command.args(["-c", "kill -STOP $$; exec lunbd --json \"$@\"", "lunbd"]);
    command.args(arguments).process_group(0);
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("sh");
    let pid = Pid::from_raw(i32::try_from(child.id()).expect("a pid"));
    waitpid(pid, Some(WaitPidFlag::WUNTRACED)).expect("the shell's stop");
    let options = Options::PTRACE_O_TRACESYSGOOD
        | Options::PTRACE_O_TRACECLONE
        | Options::PTRACE_O_TRACEEXEC
        | Options::PTRACE_O_EXITKILL;
    ptrace::seize(pid, options).expect("to trace it");
    kill(pid, Signal::SIGCONT).expect("to let it go on");
    let mut tracer = Tracer {
        pid,
        inject,
        threads: BTreeMap::new(),
        acts: Vec::new(),
        counts: BTreeMap::new(),
        injected: false,
        runs: false,
    };
    // Shorter than a pipe, what it prints is there when it has ended.
    let (has_ended, waits) = mpsc::channel::<()>();
    let code = thread::scope(|scope| {
        scope.spawn(move || {
            let pause = Duration::from_millis(20);
            while waits.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                if is_over() {
                    let _ended_by_itself = kill(pid, Signal::SIGTERM);
                    return;
                }
            }
        });
        let code = tracer.follow();
        drop(has_ended);
        code
    });
    let said = said(&mut child);
    Traced {
        acts: tracer.acts,
        injected: tracer.injected,
        code,
        said,
        took: begun.elapsed(),
    }
}

fn said(child: &mut Child) -> Value {
    let mut text = String::new();
    let mut out = child.stdout.take().expect("its output");
    out.read_to_string(&mut text).expect("its output");
    if text.trim().is_empty() {
        let mut error = child.stderr.take().expect("its errors");
        error.read_to_string(&mut text).expect("its errors");
    }
    serde_json::from_str(text.trim()).unwrap_or(Value::String(text))
}

/// What a thread is about when it stops next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Enters,
    /// With this result, where it is not the kernel's own.
    Leaves(Option<i64>),
}

/// How the names of the acts that are messages to multipathd begin.
const TO_MULTIPATHD: &str = "multipathd";

struct Tracer<'a> {
    pid: Pid,
    inject: Option<(&'a str, Fault)>,
    threads: BTreeMap<i32, Next>,
    acts: Vec<String>,
    counts: BTreeMap<String, u32>,
    injected: bool,
    /// The shell has become the program.
    runs: bool,
}

impl Tracer<'_> {
    /// Until the process has ended: what it left with, if it was not killed.
    fn follow(&mut self) -> Option<i32> {
        let group = Pid::from_raw(-self.pid.as_raw());
        loop {
            match waitpid(group, Some(WaitPidFlag::__WALL)) {
                Ok(WaitStatus::Exited(pid, code)) if pid == self.pid => return Some(code),
                Ok(WaitStatus::Signaled(pid, ..)) if pid == self.pid => return None,
                Ok(WaitStatus::PtraceSyscall(thread)) => self.stopped(thread),
                Ok(WaitStatus::PtraceEvent(thread, signal, event)) => {
                    self.runs |= event == libc::PTRACE_EVENT_EXEC;
                    // A new thread's first stop, or a stop of the whole group,
                    // which the tracer is to end.
                    let _ = (signal, event);
                    go_on(thread, None);
                }
                Ok(WaitStatus::Stopped(thread, signal)) => go_on(thread, Some(signal)),
                Ok(_) => {}
                Err(errno) => panic!("the program: {errno}"),
            }
        }
    }

    fn stopped(&mut self, thread: Pid) {
        let next = self.threads.get(&thread.as_raw()).copied();
        match next.unwrap_or(Next::Enters) {
            Next::Enters => {
                let Ok(registers) = ptrace::getregs(thread) else {
                    return;
                };
                let fault = self.enters(thread, &registers);
                let result = match fault {
                    None => None,
                    Some((act, Fault::Hangs)) if act.starts_with(TO_MULTIPATHD) => {
                        // All that it would send.
                        Some(registers.rdx.cast_signed())
                    }
                    // It stays where it is until the process ends.
                    Some((_, Fault::Hangs)) => return,
                    Some((_, Fault::Fails(errno))) => Some(-i64::from(errno as i32)),
                };
                if result.is_some() {
                    let mut none = registers;
                    // No call has this number.
                    none.orig_rax = u64::MAX;
                    ptrace::setregs(thread, none).expect("its registers");
                }
                self.threads.insert(thread.as_raw(), Next::Leaves(result));
            }
            Next::Leaves(result) => {
                if let Some(result) = result {
                    let mut registers = ptrace::getregs(thread).expect("its registers");
                    registers.rax = result.cast_unsigned();
                    ptrace::setregs(thread, registers).expect("its registers");
                }
                self.threads.insert(thread.as_raw(), Next::Enters);
            }
        }
        go_on(thread, None);
    }

    /// The act that the call is and the fault that it is to have.
    fn enters(&mut self, thread: Pid, registers: &libc::user_regs_struct) -> Option<(&str, Fault)> {
        if !self.runs {
            return None;
        }
        let name = self.act(thread, registers)?;
        let count = self.counts.entry(name.clone()).or_default();
        *count += 1;
        let act = format!("{name}:{count}");
        let fault = self.inject.filter(|(wanted, _)| *wanted == act);
        self.injected |= fault.is_some();
        self.acts.push(act);
        fault
    }

    /// What the call does to the kernel, where it is one of those that count.
    fn act(&self, thread: Pid, registers: &libc::user_regs_struct) -> Option<String> {
        let call = i64::try_from(registers.orig_rax).ok()?;
        let fd = i32::try_from(registers.rdi).ok()?;
        // A thread may have open files of its own.
        let files = format!("/proc/{}/task/{thread}/fd", self.pid);
        let target = || fs::read_link(format!("{files}/{fd}")).ok();
        match call {
            libc::SYS_write => {
                let path = target()?;
                path.starts_with("/sys").then_some(())?;
                Some(format!("write {}", name_of(&path)))
            }
            libc::SYS_fsync => {
                let path = target()?;
                path.starts_with("/dev").then_some(())?;
                Some("fsync".to_owned())
            }
            libc::SYS_ioctl => {
                let path = target()?;
                path.starts_with("/dev").then_some(())?;
                let number = registers.rsi & 0xffff_ffff;
                Some(match number {
                    0x2285 => "ioctl SG_IO".to_owned(),
                    0x1261 => "ioctl BLKFLSBUF".to_owned(),
                    0x8008_1280 => "ioctl BLKGETDISKSEQ".to_owned(),
                    dm if (dm >> 8) & 0xff == DM_IOCTL => format!("dm {}", dm_name(dm & 0xff)),
                    other => format!("ioctl {other:#x} {}", name_of(&path)),
                })
            }
            libc::SYS_connect => {
                // The family, and the port in the network's order.
                let head = word_at(thread, registers.rsi)?.to_ne_bytes();
                let to = u16::from_be_bytes([head[2], head[3]]);
                let family = i32::from(u16::from_ne_bytes([head[0], head[1]]));
                let is_tcp = matches!(family, libc::AF_INET | libc::AF_INET6);
                (is_tcp && to == ISCSI_PORT).then(|| "iscsi connect".to_owned())
            }
            libc::SYS_sendto => {
                let socket = target()?.to_string_lossy().into_owned();
                let inode = socket.strip_prefix("socket:[")?.strip_suffix(']')?;
                let word = |offset: u64| word_at(thread, registers.rsi.checked_add(offset)?);
                if is_unix(inode) {
                    return to_multipathd(registers.rdx, word);
                }
                match netlink_protocol(inode).as_deref() {
                    Some(GENERIC) => {
                        let family = (word(0)? >> 32) & 0xffff;
                        let command = word(16)? & 0xff;
                        let controller = family == i64::from(libc::GENL_ID_CTRL);
                        Some(if controller {
                            "netlink family".to_owned()
                        } else {
                            format!("netlink command {command}")
                        })
                    }
                    Some(ISCSI) => {
                        let event = (word(0)? >> 32) & 0xffff;
                        let param = word(40)? & 0xffff_ffff;
                        Some(if event == SET_PARAM {
                            format!("iscsi set {param}")
                        } else {
                            format!("iscsi event {event}")
                        })
                    }
                    Some(_) => None,
                    None => is_to_port(inode, ISCSI_PORT).then(|| "iscsi send".to_owned()),
                }
            }
            _ => None,
        }
    }
}

/// Eight bytes of the program's.
fn word_at(thread: Pid, address: u64) -> Option<i64> {
    let address = std::ptr::with_exposed_provenance_mut(usize::try_from(address).ok()?);
    ptrace::read(thread, address).ok()
}

fn go_on(thread: Pid, signal: Option<Signal>) {
    // It may have been killed meanwhile.
    let _gone = ptrace::syscall(thread, signal);
}

fn name_of(path: &Path) -> String {
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// Protocols of netlink, as the kernel's table has them.
const GENERIC: &str = "16";
const ISCSI: &str = "8";
/// `ISCSI_UEVENT_SET_PARAM`.
const SET_PARAM: i64 = 16;
const ISCSI_PORT: u16 = 3260;

/// `DM_IOCTL`, the type of device-mapper's ioctls.
const DM_IOCTL: u64 = 0xfd;

/// By its number (`include/uapi/linux/dm-ioctl.h`).
fn dm_name(number: u64) -> String {
    match number {
        4 => "remove".to_owned(),
        6 => "suspend or resume".to_owned(),
        7 => "status".to_owned(),
        9 => "load".to_owned(),
        12 => "table".to_owned(),
        14 => "message".to_owned(),
        other => other.to_string(),
    }
}

/// A length of eight bytes, and then a command of so many: its verb.
fn to_multipathd(length: u64, word: impl Fn(u64) -> Option<i64>) -> Option<String> {
    let announced = word(0)?.cast_unsigned();
    (announced.checked_add(8)? == length).then_some(())?;
    let text = [8, 16, 24].iter().map_while(|offset| word(*offset));
    let bytes: Vec<u8> = text.flat_map(i64::to_ne_bytes).collect();
    let bytes = bytes
        .get(..usize::try_from(announced).ok()?)
        .unwrap_or(&bytes);
    let text = String::from_utf8_lossy(bytes);
    let verb: Vec<&str> = text.trim_end_matches('\0').split(' ').take(2).collect();
    Some(format!("{TO_MULTIPATHD} {}", verb.join(" ")))
}

fn is_unix(inode: &str) -> bool {
    let table = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let mut lines = table.lines();
    lines.any(|line| line.split_whitespace().nth(6) == Some(inode))
}

fn netlink_protocol(inode: &str) -> Option<String> {
    let table = fs::read_to_string("/proc/net/netlink").unwrap_or_default();
    table.lines().find_map(|line| {
        let mut fields = line.split_whitespace();
        let protocol = fields.nth(1)?;
        (fields.next_back() == Some(inode)).then(|| protocol.to_owned())
    })
}

fn is_to_port(inode: &str, port: u16) -> bool {
    let end = format!(":{port:04X}");
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
    let tables = tables.map(|path| fs::read_to_string(path).unwrap_or_default());
    tables.iter().flat_map(|table| table.lines()).any(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let to = fields.get(2).is_some_and(|to| to.ends_with(&end));
        to && fields.get(9) == Some(&inode)
    })
}
