//! An md array that is made through sysfs alone.

use std::fs;
use std::path::Path;
use std::time::Duration;

const MD: &str = "/sys/block/md127/md";
const LIMIT: Duration = Duration::from_secs(60);

/// An array that is not started. It claims its disk as soon as it has it.
#[derive(Debug)]
pub struct Array(());

impl Array {
    /// Makes an array with this disk.
    #[must_use]
    pub fn with(disk: &Path) -> Self {
        super::need_module("raid1");
        fs::write("/sys/module/md_mod/parameters/new_array", "md127").expect("an array");
        let name = disk.file_name().expect("a name").to_string_lossy();
        let number = fs::read_to_string(format!("/sys/class/block/{name}/dev"));
        let number = number.expect("its number");
        for (attribute, value) in [
            ("metadata_version", "none"),
            ("level", "raid1"),
            ("new_dev", number.trim()),
        ] {
            let path = Path::new(MD).join(attribute);
            fs::write(&path, value).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        }
        Self(())
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        let cleared = fs::write(Path::new(MD).join("array_state"), "clear");
        if let Err(error) = cleared {
            eprintln!("md127 stays: {error}");
        }
        super::wait_until("the array to let go", LIMIT, || {
            let members = super::entries(MD);
            let holds = members.iter().any(|name| name.starts_with("dev-"));
            (!holds).then_some(())
        });
    }
}
