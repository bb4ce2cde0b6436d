//! Makes some of a program's calls to the kernel fail or never return, without a change to the
//! program: it is traced, and the call is replaced where it enters the kernel.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
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

/// What happens instead of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The call fails, and the kernel has done nothing.
    Fails(Errno),
    /// The call does not return while the process lives. A message to multipathd, which is sent
    /// without waiting, is lost instead: no answer comes.
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
    /// The acts on the kernel, in order, each with its count: `write delete:1`.
    pub acts: Vec<String>,
    /// The fault was injected.
    pub injected: bool,
    /// The program's exit code.
    pub code: Option<i32>,
    /// The program's output as JSON: the outcome, or the error.
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

/// Runs `lunbd --json` with these arguments; the named act has the fault.
#[must_use]
pub fn run(arguments: &[String], inject: Option<(&str, Fault)>) -> Traced {
    run_until(arguments, inject, |_| false)
}

/// The same for a command that keeps running: it is ended (SIGTERM) when `is_over`, which is told
/// whether the fault was injected.
#[must_use]
pub fn run_until(
    arguments: &[String],
    inject: Option<(&str, Fault)>,
    mut is_over: impl FnMut(bool) -> bool + Send,
) -> Traced {
    super::enter();
    let begun = Instant::now();
    // The shell waits until it is traced, so that no call is missed.
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
    let injected = AtomicBool::new(false);
    let mut tracer = Tracer {
        pid,
        inject,
        threads: BTreeMap::new(),
        acts: Vec::new(),
        counts: BTreeMap::new(),
        injected: &injected,
        runs: false,
    };
    // The output is shorter than a pipe's buffer, so it is complete when the program has ended.
    let (has_ended, waits) = mpsc::channel::<()>();
    let code = thread::scope(|scope| {
        let injected = &injected;
        scope.spawn(move || {
            let pause = Duration::from_millis(20);
            while waits.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                if is_over(injected.load(Ordering::Relaxed)) {
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
        injected: injected.load(Ordering::Relaxed),
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

/// The next stop of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Enters,
    /// With this result, if the call was replaced.
    Leaves(Option<i64>),
}

/// The prefix of the acts that are messages to multipathd.
const TO_MULTIPATHD: &str = "multipathd";

struct Tracer<'a> {
    pid: Pid,
    inject: Option<(&'a str, Fault)>,
    threads: BTreeMap<i32, Next>,
    acts: Vec<String>,
    counts: BTreeMap<String, u32>,
    injected: &'a AtomicBool,
    /// The shell has become the program.
    runs: bool,
}

impl Tracer<'_> {
    /// Follows the process to its end. Returns its exit code, or `None` if it was killed.
    fn follow(&mut self) -> Option<i32> {
        let group = Pid::from_raw(-self.pid.as_raw());
        loop {
            match waitpid(group, Some(WaitPidFlag::__WALL)) {
                Ok(WaitStatus::Exited(pid, code)) if pid == self.pid => return Some(code),
                Ok(WaitStatus::Signaled(pid, ..)) if pid == self.pid => return None,
                Ok(WaitStatus::PtraceSyscall(thread)) => self.stopped(thread),
                Ok(WaitStatus::PtraceEvent(thread, signal, event)) => {
                    self.runs |= event == libc::PTRACE_EVENT_EXEC;
                    // The first stop of a new thread, or a stop of the whole group, which the
                    // tracer must end.
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
                        // Report the whole message as sent.
                        Some(registers.rdx.cast_signed())
                    }
                    // The thread stays there until the process ends.
                    Some((_, Fault::Hangs)) => return,
                    Some((_, Fault::Fails(errno))) => Some(-i64::from(errno as i32)),
                };
                if result.is_some() {
                    let mut none = registers;
                    // No call has this number, so the kernel does nothing.
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

    /// The act of a call and the fault to inject into it.
    fn enters(&mut self, thread: Pid, registers: &libc::user_regs_struct) -> Option<(&str, Fault)> {
        if !self.runs {
            return None;
        }
        let name = self.act(thread, registers)?;
        let count = self.counts.entry(name.clone()).or_default();
        *count += 1;
        let act = format!("{name}:{count}");
        let fault = self.inject.filter(|(wanted, _)| *wanted == act);
        self.injected.fetch_or(fault.is_some(), Ordering::Relaxed);
        self.acts.push(act);
        fault
    }

    /// The name of the call's act on the kernel, if the call counts.
    fn act(&self, thread: Pid, registers: &libc::user_regs_struct) -> Option<String> {
        let call = i64::try_from(registers.orig_rax).ok()?;
        let fd = i32::try_from(registers.rdi).ok()?;
        // A thread may have its own file table.
        let files = format!("/proc/{}/task/{thread}/fd", self.pid);
        let target = || fs::read_link(format!("{files}/{fd}")).ok();
        match call {
            libc::SYS_write => {
                let path = target()?;
                path.starts_with("/sys").then_some(())?;
                Some(format!("write {}", name_of(&path)))
            }
            libc::SYS_fsync | libc::SYS_sync_file_range => {
                let path = target()?;
                path.starts_with("/dev").then_some(())?;
                let is_fsync = call == libc::SYS_fsync;
                Some(if is_fsync { "fsync" } else { "sync_file_range" }.to_owned())
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
                // The family, and the port in network byte order.
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

/// Eight bytes of the program's memory.
fn word_at(thread: Pid, address: u64) -> Option<i64> {
    let address = std::ptr::with_exposed_provenance_mut(usize::try_from(address).ok()?);
    ptrace::read(thread, address).ok()
}

fn go_on(thread: Pid, signal: Option<Signal>) {
    // The thread may have been killed meanwhile.
    let _gone = ptrace::syscall(thread, signal);
}

fn name_of(path: &Path) -> String {
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// Netlink protocol numbers, as the kernel's table has them.
const GENERIC: &str = "16";
const ISCSI: &str = "8";
/// `ISCSI_UEVENT_SET_PARAM`.
const SET_PARAM: i64 = 16;
const ISCSI_PORT: u16 = 3260;

/// `DM_IOCTL`, the type of device-mapper's ioctls.
const DM_IOCTL: u64 = 0xfd;

/// The name of an ioctl by its number (`include/uapi/linux/dm-ioctl.h`).
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

/// The message has a length of eight bytes and then a command of that length. Returns its verb.
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
