use anyhow::Result;
pub(crate) fn run() -> Result<()> {
    Ok(())
}
