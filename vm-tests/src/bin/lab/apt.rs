//! A separate apt configuration, beside the machine's: it downloads packages of any release,
//! checks Debian's signatures, and installs nothing. It is no mmdebstrap, which makes one root
//! with all dependencies: the kernels and QEMU come from here too, without theirs, and each
//! package is downloaded once.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cache::Cache;
use crate::debian::Mirrors;

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// A Debian release as the archive serves it.
pub(crate) struct Archive {
    directory: PathBuf,
    packages: PathBuf,
    /// The update's errors, shown only when a package is missing.
    complaint: String,
}

impl Archive {
    /// Fetches the package lists of `codename`.
    pub(crate) fn update(cache: &Cache, mirrors: &Mirrors, codename: &str) -> Result<Self> {
        let directory = cache.directory(&format!("apt-{codename}"))?;
        for part in [
            "state/lists/partial",
            "cache/archives/partial",
            "preferences",
        ] {
            fs::create_dir_all(directory.join(part)).context("apt's directories")?;
        }
        fs::write(directory.join("status"), "").context("an empty dpkg status")?;
        fs::write(directory.join("sources.list"), sources(mirrors, codename))?;
        fs::write(directory.join("apt.conf"), configuration(&directory))?;
        let packages = cache.directory(&format!("packages-{codename}"))?;
        let mut archive = Self {
            directory,
            packages,
            complaint: String::new(),
        };
        let updated = archive
            .apt("apt-get")
            .args(["--quiet", "update"])
            .output()?;
        // One of several suites may be gone from the mirror (an old release's). Whether that
        // matters shows when a package is requested.
        archive.complaint = String::from_utf8_lossy(&updated.stderr).into_owned();
        if updated.status.success() && archive.complaint.is_empty() {
            archive.forget_what_is_gone()?;
        } else if cache.refreshes() {
            eprint!("{}", archive.complaint);
        }
        Ok(archive)
    }

    /// Removes downloaded packages that the archive no longer has.
    fn forget_what_is_gone(&self) -> Result<()> {
        for directory in [&self.packages, &self.directory.join("cache/archives")] {
            let mut autoclean = self.apt("apt-get");
            autoclean
                .arg("--option")
                .arg(format!("Dir::Cache::archives={}", directory.display()))
                .arg("autoclean");
            self.output(autoclean, "removing old packages")?;
        }
        Ok(())
    }

    /// `package` and its dependencies whose names start with one of `prefixes`: a kernel and
    /// its parts, without what a running system needs besides.
    pub(crate) fn family(&self, package: &str, prefixes: &[&str]) -> Result<Vec<String>> {
        let mut known = BTreeSet::from([package.to_owned()]);
        let mut open = vec![package.to_owned()];
        while let Some(package) = open.pop() {
            let mut query = self.apt("apt-cache");
            query.args([
                "depends",
                "--no-recommends",
                "--no-suggests",
                "--",
                &package,
            ]);
            let depends = self.output(query, &format!("asking for {package}"))?;
            for name in depends
                .lines()
                .filter_map(|line| line.trim().strip_prefix("Depends: "))
            {
                let wanted = prefixes.iter().any(|prefix| name.starts_with(prefix));
                if wanted && known.insert(name.to_owned()) {
                    open.push(name.to_owned());
                }
            }
        }
        Ok(known.into_iter().collect())
    }

    /// Downloads exactly `packages`; returns the files.
    pub(crate) fn download(&self, packages: &[String]) -> Result<Vec<PathBuf>> {
        let mut download = self.apt("apt-get");
        download
            .arg("--quiet")
            .arg("download")
            .args(packages)
            .current_dir(&self.packages);
        self.output(download, "downloading packages")?;
        let mut uris = self.apt("apt-get");
        uris.args(["--quiet=2", "--print-uris", "download"])
            .args(packages);
        // Run it in another directory, or apt omits the files that are already here.
        uris.current_dir(&self.directory);
        self.files_of(uris, &self.packages)
    }

    /// Downloads `packages` and all their dependencies; returns the files.
    pub(crate) fn download_with_dependencies(&self, packages: &[&str]) -> Result<Vec<PathBuf>> {
        let install = |arguments: &[&str]| {
            let mut install = self.apt("apt-get");
            install.args(arguments);
            install.args(["--yes", "--no-install-recommends", "install", "--"]);
            install.args(packages);
            install
        };
        let download = install(&["--quiet", "--download-only"]);
        self.output(download, "downloading packages")?;
        // Run it without archives, or apt omits the packages that are already here.
        let uris = install(&[
            "--quiet=2",
            "--print-uris",
            "--option=Dir::Cache::archives=none/",
        ]);
        self.files_of(uris, &self.directory.join("cache/archives"))
    }

    fn files_of(&self, uris: Command, directory: &Path) -> Result<Vec<PathBuf>> {
        // `'URI' FILE SIZE HASH`
        let printed = self.output(uris, "listing packages")?;
        let names = printed.lines().filter_map(|line| line.split(' ').nth(1));
        let files: Vec<PathBuf> = names.map(|name| directory.join(name)).collect();
        match files.iter().find(|file| !file.exists()) {
            Some(missing) => bail!("{} was not downloaded", missing.display()),
            None => Ok(files),
        }
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env("APT_CONFIG", self.directory.join("apt.conf"))
            .env("LC_ALL", "C.UTF-8");
        command
    }

    fn output(&self, mut command: Command, what: &str) -> Result<String> {
        let output = command.output().with_context(|| what.to_owned())?;
        if !output.status.success() {
            bail!(
                "{what}: {}\n{}{}",
                output.status,
                self.complaint,
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

fn sources(mirrors: &Mirrors, codename: &str) -> String {
    // Debian does not sign the suites of a release past its end again, so their date expires.
    // apt still checks the signature itself.
    let options = match codename {
        "bullseye" => format!("[signed-by={KEYRING} check-valid-until=no]"),
        _ => format!("[signed-by={KEYRING}]"),
    };
    let mut suites = vec![(&mirrors.main, codename.to_owned())];
    if codename != "sid" && !codename.ends_with("-backports") {
        suites.push((&mirrors.main, format!("{codename}-updates")));
        if let Some(security) = &mirrors.security {
            suites.push((security, format!("{codename}-security")));
        }
    }
    let lines = suites
        .iter()
        .map(|(mirror, suite)| format!("deb {options} {mirror} {suite} main\n"));
    lines.collect()
}

fn configuration(directory: &Path) -> String {
    let at = |part: &str| directory.join(part).display().to_string();
    // apt also reads the machine's own apt.conf.d, which may name a proxy.
    format!(
        r#"Dir::State "{}";
Dir::State::lists "{}";
Dir::State::status "{}";
Dir::Cache "{}";
Dir::Cache::archives "{}";
Dir::Etc::sourcelist "{}";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "{}";
APT::Sandbox::User "root";
APT::Architecture "amd64";
APT::Architectures {{ "amd64"; }};
APT::Default-Release "";
APT::Keep-Downloaded-Packages "true";
Acquire::Languages "none";
Acquire::Retries "8";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled "false";
"#,
        at("state"),
        at("state/lists"),
        at("status"),
        at("cache"),
        at("cache/archives"),
        at("sources.list"),
        at("preferences"),
    )
}
