// Asks the server, with the token and the job of the page's address.

const given = new URLSearchParams(location.search);
const job = given.get("job");
if (given.get("token")) sessionStorage.setItem("token", given.get("token"));
if (given.has("token")) history.replaceState(null, "", location.pathname + (job ? `?job=${encodeURIComponent(job)}` : "") + location.hash);
const token = sessionStorage.getItem("token");

export async function ask(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams(job ? { ...parameters, job } : parameters);
  const answer = await fetch(`/api/${path}?${query}`, { headers: { Authorization: `Bearer ${token}` }, signal, cache: "no-store" });
  if (!answer.ok) throw Object.assign(new Error((await answer.text()).trim()), { status: answer.status });
  return answer;
}
