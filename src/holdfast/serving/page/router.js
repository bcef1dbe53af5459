// Addresses of views: #/view?name=value. Each can be shared, and the back button returns to the one before.
export function readRoute() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: path || "snapshots", parameters: Object.fromEntries(new URLSearchParams(query || "")) };
}

export function address(view, parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters || {})) if (value !== "" && value !== undefined && value !== null) query.set(name, value);
  const text = query.toString();
  return "#/" + view + (text ? "?" + text : "");
}

export function go(view, parameters) {
  location.hash = address(view, parameters);
}

// Changes the address of the view that is shown, such as its filter, without a new entry in the history.
export function note(parameters) {
  const route = readRoute();
  history.replaceState(null, "", address(route.view, { ...route.parameters, ...parameters }));
}
