//! Compares a line of `--json` with `docs/lunbd.schema.json`. It is stricter than the schema:
//! a field that the schema does not name is a fault.
#![allow(clippy::panic, reason = "a test panics to fail")]

use serde_json::{Map, Value};

const SCHEMA: &str = include_str!("../../docs/lunbd.schema.json");

/// Panics if `line` is not as the schema says.
pub(crate) fn require(line: &Value) {
    if let Err(fault) = compare(line) {
        panic!("{fault}: {line}");
    }
}

/// Compares with the definition that the line's type names, which gives better errors than
/// the schema's list of all types.
pub(crate) fn compare(line: &Value) -> Result<(), String> {
    let schema: Value = serde_json::from_str(SCHEMA).map_err(|error| error.to_string())?;
    let reference = format!("#/$defs/{}", line["type"].as_str().unwrap_or_default());
    let is_it = |one: &Value| one["$ref"] == *reference;
    let types = schema["oneOf"].as_array();
    if !types.is_some_and(|types| types.iter().any(is_it)) {
        return Err(format!("no type {reference}"));
    }
    let one = serde_json::json!({ "$ref": reference });
    Validator { schema: &schema }.check(&one, line, "")
}

struct Validator<'a> {
    schema: &'a Value,
}

impl Validator<'_> {
    fn check(&self, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
        let keywords = schema.as_object().ok_or("a schema that is no object")?;
        for (keyword, wants) in keywords {
            let is_met = match keyword.as_str() {
                "description" => true,
                "$ref" => return self.check(self.resolve(wants)?, value, at),
                "const" => value == wants,
                "enum" => wants.as_array().is_some_and(|all| all.contains(value)),
                "type" => is_of_type(wants, value),
                "minimum" => value.as_f64() >= wants.as_f64() || value.is_null(),
                "required" => first_missing(wants, value)
                    .map_or(Ok(true), |name| Err(format!("{at}: it lacks {name}")))?,
                "items" => {
                    for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                        self.check(wants, item, &format!("{at}/{index}"))?;
                    }
                    true
                }
                "properties" => {
                    self.check_properties(keywords, wants, value, at)?;
                    true
                }
                "additionalProperties" => {
                    for (name, field) in value.as_object().into_iter().flatten() {
                        self.check(wants, field, &format!("{at}/{name}"))?;
                    }
                    true
                }
                "oneOf" => {
                    self.check_one_of(wants, value, at)?;
                    true
                }
                other => return Err(format!("the test does not know the keyword {other}")),
            };
            if !is_met {
                return Err(format!("{at}: {value} is not as {keyword} {wants}"));
            }
        }
        Ok(())
    }

    fn check_properties(
        &self,
        keywords: &Map<String, Value>,
        wants: &Value,
        value: &Value,
        at: &str,
    ) -> Result<(), String> {
        // An object without a type only adds conditions to the one around it.
        let is_whole = keywords.contains_key("type");
        for (name, field) in value.as_object().into_iter().flatten() {
            match wants.get(name) {
                Some(wants) => self.check(wants, field, &format!("{at}/{name}"))?,
                None if is_whole => return Err(format!("{at}: the schema does not name {name}")),
                None => {}
            }
        }
        Ok(())
    }

    fn check_one_of(&self, wants: &Value, value: &Value, at: &str) -> Result<(), String> {
        let all = wants.as_array().ok_or("a oneOf that is no list")?;
        let results = all.iter().map(|one| self.check(one, value, at));
        let (met, faults): (Vec<_>, Vec<_>) = results.partition(Result::is_ok);
        if met.len() == 1 {
            return Ok(());
        }
        let faults: Vec<String> = faults.into_iter().filter_map(Result::err).collect();
        let count = met.len();
        Err(format!(
            "{at}: {count} of oneOf fit; {}",
            faults.join(" | ")
        ))
    }

    fn resolve(&self, reference: &Value) -> Result<&Value, String> {
        let path = reference.as_str().and_then(|text| text.strip_prefix('#'));
        let found = path.and_then(|path| self.schema.pointer(path));
        found.ok_or_else(|| format!("{reference} leads nowhere"))
    }
}

/// The first required name that `value` lacks.
fn first_missing<'a>(wants: &'a Value, value: &Value) -> Option<&'a Value> {
    let mut names = wants.as_array().into_iter().flatten();
    names.find(|name| name.as_str().is_none_or(|name| value.get(name).is_none()))
}

fn is_of_type(wants: &Value, value: &Value) -> bool {
    let is = |name: &Value| match name.as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("number") => value.is_number(),
        Some("null") => value.is_null(),
        _ => false,
    };
    match wants.as_array() {
        Some(names) => names.iter().any(is),
        None => is(wants),
    }
}
